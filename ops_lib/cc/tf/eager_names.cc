#include "tf/eager_names.h"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "runtime/description.h"

namespace ddl {
namespace {

// Not in a name: OneLine replaces it.
constexpr char kSlotMark = '\1';
constexpr int kSlotBits = 16;

struct Slot {
  int64_t uses = 0;
  bool full = false;
  std::string name;
};

struct Slots {
  std::mutex mutex;  // guards what follows
  std::vector<Slot> all;
  std::vector<int64_t> free;  // the last one first, so that few kernels are made
};

Slots& TheSlots() {
  static auto* const slots = new Slots;  // a kernel may run while the process ends
  return *slots;
}

// The slots are locked.
void Empty(Slots* slots, int64_t number) {
  slots->all[number].full = false;
  slots->free.push_back(number);
}

}  // namespace

std::string TakeName(const std::string& request) {
  if (request.empty() || request[0] != kSlotMark) return OneLine(request);
  Slots& slots = TheSlots();
  const int64_t number = std::atoll(request.c_str() + 1);
  std::lock_guard<std::mutex> lock(slots.mutex);
  if (number >= static_cast<int64_t>(slots.all.size()) || !slots.all[number].full) {
    return OneLine(request);
  }
  Empty(&slots, number);
  return std::move(slots.all[number].name);
}

}  // namespace ddl

extern "C" {

// Puts the name of an eager collective into a slot, whose number is in the 16 lowest bits of what
// is returned; -1: there is none. The op's attribute `request` is then "\1" and that number.
__attribute__((visibility("default"))) int64_t ddl_name_eager(const char* name) {
  ddl::Slots& slots = ddl::TheSlots();
  std::lock_guard<std::mutex> lock(slots.mutex);
  if (slots.free.empty()) {
    if (slots.all.size() == size_t{1} << ddl::kSlotBits) return -1;
    slots.free.push_back(static_cast<int64_t>(slots.all.size()));
    slots.all.emplace_back();
  }
  const int64_t number = slots.free.back();
  slots.free.pop_back();
  ddl::Slot& slot = slots.all[number];
  slot.full = true;
  slot.name = ddl::OneLine(name);
  return ++slot.uses << ddl::kSlotBits | number;
}

// The collective that ddl_name_eager returned this for has failed, maybe before it took its name.
__attribute__((visibility("default"))) void ddl_unname_eager(int64_t use) {
  ddl::Slots& slots = ddl::TheSlots();
  std::lock_guard<std::mutex> lock(slots.mutex);
  const int64_t number = use & ((int64_t{1} << ddl::kSlotBits) - 1);
  const ddl::Slot& slot = slots.all[number];
  if (slot.full && slot.uses == use >> ddl::kSlotBits) ddl::Empty(&slots, number);
}

}  // extern "C"
