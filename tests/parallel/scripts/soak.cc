// A random sequence of collectives, the same on every rank, each element checked. See
// tests/soak/README.md.

#include "soak.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/host_barrier.h"
#include "comm/mpi_session.h"
#include "core/half.h"
#include "runtime/engine.h"
#include "transport/host_group.h"

namespace {

using ddl::DType;
using ddl::Request;
using Random = std::mt19937_64;

constexpr int kSlots = 8;       // collectives in flight
constexpr int kMaxTensors = 40;  // in one group
constexpr int kGuard = 64;      // bytes behind each tensor that nobody may touch
constexpr unsigned char kGuardByte = 0xc5;
constexpr int kWrong = 4, kFailed = 5;  // exit codes
constexpr auto kHangLimit = std::chrono::seconds(100);  // more than any collective may take

constexpr DType kReduced[] = {DType::kFloat32, DType::kFloat64, DType::kInt32,
                              DType::kInt64,   DType::kFloat16, DType::kBfloat16};
constexpr DType kPlain[] = {DType::kFloat32,  DType::kInt8,      DType::kUint8, DType::kInt16,
                            DType::kFloat16,  DType::kComplex64, DType::kBool,  DType::kInt64,
                            DType::kComplex128};

int64_t Size(DType dtype) { return static_cast<int64_t>(ddl::DTypeSize(dtype)); }

// One write for each line: it is whole, or not there, when this process is killed.
class Journal {
 public:
  explicit Journal(const std::string& path)
      : file_(path.empty() ? STDOUT_FILENO
                           : open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644)) {}

  void Say(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    const int length = std::vsnprintf(line, sizeof(line) - 1, format, arguments);
    va_end(arguments);
    const size_t n = std::min<size_t>(length, sizeof(line) - 2);
    line[n] = '\n';
    if (write(file_, line, n + 1) < 0) std::abort();
  }

 private:
  int file_;
};

// What one rank gets wrong on purpose.
enum class Mistake { kNone, kShape, kDtype, kName, kRoot, kRaised, kCancelled };

// What one collective does; the same on every rank.
struct Collective {
  int64_t index = 0;
  Request::Kind kind = Request::Kind::kAllReduce;
  DType dtype = DType::kFloat32;
  bool average = false, in_place = false, unfused = false, check = false;
  int root = 0;
  Mistake mistake = Mistake::kNone;
  int mistaken = 0;  // the rank that makes it
  std::vector<int64_t> counts;  // of each tensor; for a gather: rows of each rank
  int64_t columns = 1;
  std::vector<int64_t> offsets;  // bytes from the begin of the memory

  bool gathers() const { return kind == Request::Kind::kAllGather; }
};

// Values of one dtype that stay exact when summed over up to 16 ranks: an index's own, plus an
// offset of the rank. Written so that compilers vectorise the loops.
struct Numbers {
  uint32_t mask;
  int64_t scale;
  // Halves are rounded once, after the division: offsets that cancel leave nothing to round.
  bool cancel;

  static Numbers Of(DType dtype) {
    switch (dtype) {
      case DType::kFloat16: return {63, 1, true};
      case DType::kBfloat16: return {15, 1, true};
      case DType::kFloat64:
      case DType::kInt64: return {(1 << 19) - 1, 1048577, false};
      default: return {(1 << 19) - 1, 1, false};
    }
  }

  // Also of elements 2^31 or 2^32 apart the values differ.
  int32_t At(int64_t i, int64_t index) const {
    const uint32_t mixed = static_cast<uint32_t>(i) * 7919 + static_cast<uint32_t>(i >> 11) * 611 +
                           static_cast<uint32_t>(i >> 29) * 29 + static_cast<uint32_t>(index) * 37;
    return static_cast<int32_t>(mixed & mask) - static_cast<int32_t>(mask / 2);
  }
  int32_t OffsetOf(int rank, int size) const {
    return cancel ? 2 * rank - (size - 1) : rank * rank * 13 + rank * 5 + 1;
  }
};

template <typename T>
void FillAs(void* memory, int64_t count, const Numbers& numbers, int64_t index, int rank, int size,
            int64_t first = 0) {
  T* out = static_cast<T*>(memory);
  const int32_t offset = numbers.OffsetOf(rank, size);
  const T scale = static_cast<T>(numbers.scale);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<T>(numbers.At(first + i, index) + offset) * scale;
  }
}

// The first index at which `wrong` is true, or -1. Counts a block at a time, without a branch.
template <typename Wrong>
int64_t Find(int64_t count, Wrong wrong) {
  constexpr int64_t kBlock = 4096;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = std::min(first + kBlock, count);
    int found = 0;
    for (int64_t i = first; i < last; ++i) found |= wrong(i) ? 1 : 0;
    if (!found) continue;
    for (int64_t i = first; i < last; ++i) {
      if (wrong(i)) return i;
    }
  }
  return -1;
}

// The index of the first element that is not the total, or -1.
template <typename T>
int64_t FindWrongAs(const void* memory, int64_t count, const Numbers& numbers, int64_t index,
                    int size, bool average, int64_t first = 0) {
  const T* got = static_cast<const T*>(memory);
  int32_t offset = 0;
  for (int rank = 0; rank < size; ++rank) offset += numbers.OffsetOf(rank, size);
  const T scale = static_cast<T>(numbers.scale), divisor = static_cast<T>(average ? size : 1);
  return Find(count, [=](int64_t i) {
    const T sum = static_cast<T>(numbers.At(first + i, index) * size + offset) * scale;
    return got[i] != sum / divisor;
  });
}

// Halves go through float32, a block at a time; small integers are exact in both.
constexpr int64_t kHalves = 4096;

void FillHalves(void* memory, int64_t count, DType dtype, int64_t index, int rank, int size) {
  float wide[kHalves];
  for (int64_t first = 0; first < count; first += kHalves) {
    const int64_t n = std::min(kHalves, count - first);
    FillAs<float>(wide, n, Numbers::Of(dtype), index, rank, size, first);
    ddl::Narrow(wide, static_cast<uint16_t*>(memory) + first, n, dtype);
  }
}

int64_t FindWrongHalf(const void* memory, int64_t count, DType dtype, int64_t index, int size,
                      bool average) {
  float wide[kHalves];
  for (int64_t first = 0; first < count; first += kHalves) {
    const int64_t n = std::min(kHalves, count - first);
    ddl::Widen(static_cast<const uint16_t*>(memory) + first, wide, n, dtype);
    const int64_t at =
        FindWrongAs<float>(wide, n, Numbers::Of(dtype), index, size, average, first);
    if (at >= 0) return first + at;
  }
  return -1;
}

void Fill(void* memory, int64_t count, DType dtype, int64_t index, int rank, int size) {
  const Numbers numbers = Numbers::Of(dtype);
  switch (dtype) {
    case DType::kFloat32: return FillAs<float>(memory, count, numbers, index, rank, size);
    case DType::kFloat64: return FillAs<double>(memory, count, numbers, index, rank, size);
    case DType::kInt32: return FillAs<int32_t>(memory, count, numbers, index, rank, size);
    case DType::kInt64: return FillAs<int64_t>(memory, count, numbers, index, rank, size);
    default: return FillHalves(memory, count, dtype, index, rank, size);
  }
}

int64_t FindWrong(const void* memory, int64_t count, DType dtype, int64_t index, int size,
                  bool average) {
  const Numbers numbers = Numbers::Of(dtype);
  switch (dtype) {
    case DType::kFloat32:
      return FindWrongAs<float>(memory, count, numbers, index, size, average);
    case DType::kFloat64:
      return FindWrongAs<double>(memory, count, numbers, index, size, average);
    case DType::kInt32:
      return FindWrongAs<int32_t>(memory, count, numbers, index, size, average);
    case DType::kInt64:
      return FindWrongAs<int64_t>(memory, count, numbers, index, size, average);
    default: return FindWrongHalf(memory, count, dtype, index, size, average);
  }
}

// What broadcasts and gathers move.
unsigned char ByteOf(int64_t at, int64_t index, int rank) {
  const uint32_t i = static_cast<uint32_t>(at);
  return static_cast<unsigned char>(i * 37 + (i >> 8) * 3 + static_cast<uint32_t>(at >> 29) * 29 +
                                    static_cast<uint32_t>(index) * 11 +
                                    static_cast<uint32_t>(rank) * 101);
}

void FillBytes(unsigned char* memory, int64_t nbytes, int64_t index, int rank) {
  for (int64_t i = 0; i < nbytes; ++i) memory[i] = ByteOf(i, index, rank);
}

int64_t FindWrongByte(const unsigned char* memory, int64_t nbytes, int64_t index, int rank) {
  return Find(nbytes, [=](int64_t i) { return memory[i] != ByteOf(i, index, rank); });
}

uint64_t HashOf(const unsigned char* memory, int64_t nbytes, uint64_t hash) {
  for (int64_t i = 0; i < nbytes; ++i) hash = (hash ^ memory[i]) * 1099511628211u;
  return hash;
}

// Between 0 and `most`, as many around 10 as around 10,000; often at a border of the algorithms.
int64_t RandomCount(Random& random, int64_t most, int64_t element) {
  if (random() % 50 == 0) return 0;
  if (random() % 10 == 0) {
    const int64_t borders[] = {ddl::kMaxInlineBytes, ddl::HostGroup::kPieceBytes, 256 << 10,
                               4 << 20};
    const int64_t count = borders[random() % 4] / element + static_cast<int64_t>(random() % 3) - 1;
    if (count <= most) return count;
  }
  const double uniform = static_cast<double>(random() >> 11) / (uint64_t{1} << 53);
  return static_cast<int64_t>(std::exp(uniform * std::log(static_cast<double>(most) + 1)));
}

// `own`: nothing that calls MPI where ranks share memory, so that the engine looks for dead ranks
// all the time.
Collective RandomCollective(Random& random, int64_t index, int64_t most_bytes, int size, bool own) {
  Collective one;
  one.index = index;
  const int kind = static_cast<int>(random() % 10);
  if (kind < 7) {  // of these 3 are groups
    one.dtype = kReduced[random() % std::size(kReduced)];
    one.average = random() % 2 == 0;
    one.in_place = random() % 2 == 0;
    one.unfused = random() % 50 == 0 && !own;
    one.check = random() % 50 == 0 && !own;
    const int tensors = kind < 3 ? 1 + static_cast<int>(random() % kMaxTensors) : 1;
    for (int i = 0; i < tensors; ++i) {
      one.counts.push_back(
          RandomCount(random, most_bytes / tensors / Size(one.dtype), Size(one.dtype)));
    }
  } else if (kind < 9) {
    one.kind = Request::Kind::kBroadcast;
    one.dtype = kPlain[random() % std::size(kPlain)];
    one.in_place = true;
    one.root = static_cast<int>(random() % size);
    one.counts.push_back(RandomCount(random, most_bytes / Size(one.dtype), Size(one.dtype)));
  } else {
    one.kind = Request::Kind::kAllGather;
    one.dtype = kPlain[random() % std::size(kPlain)];
    const int64_t most = most_bytes / size / Size(one.dtype);
    one.columns = RandomCount(random, std::min<int64_t>(most, 1000), 1);
    for (int rank = 0; rank < size; ++rank) {
      one.counts.push_back(RandomCount(random, most / std::max<int64_t>(one.columns, 1), 1));
    }
  }
  int64_t offset = 0;
  for (const int64_t count : one.counts) {
    // Some begin at a cache line, as tensors of TensorFlow do, some beside one.
    offset = (offset + 63) / 64 * 64 + (random() % 3 == 0 ? Size(one.dtype) : 0);
    one.offsets.push_back(offset);
    offset += count * Size(one.dtype) + kGuard;
  }
  return one;
}

// Makes `one` wrong on one rank. Where ranks submit in orders of their own there are no wrong
// names: what only one rank has may still come on the others. `alone`: nothing else is in flight.
void MakeWrong(Random& random, bool ordered, bool alone, int size, Collective* one) {
  std::vector<Mistake> possible = {Mistake::kShape, Mistake::kDtype};
  if (ordered) possible.push_back(Mistake::kName);
  if (one->kind == Request::Kind::kBroadcast) possible.push_back(Mistake::kRoot);
  if (one->gathers()) possible.push_back(Mistake::kRaised);
  // It takes along whatever the others still ask for.
  if (alone) possible.insert(possible.end(), 4, Mistake::kCancelled);
  one->mistake = possible[random() % possible.size()];
  one->mistaken = static_cast<int>(random() % size);
}

// The memory of one collective in flight.
class Slot {
 public:
  Slot(int64_t most_bytes, int rank, int size)
      : rank_(rank), size_(size),
        nbytes_(most_bytes + kMaxTensors * (kGuard + 64 + 16)),
        in_(nbytes_, 0), out_(nbytes_, 0) {}

  void Submit(const Collective& one, bool ordered) {
    one_ = &one;
    const int64_t element = Size(one.dtype);
    Request request;
    request.kind = one.kind;
    request.name = "collective " + std::to_string(one.index % kSlots);
    request.dtype = one.dtype;
    request.ordered = ordered;
    request.run = one.index + 1;
    request.root = one.root;
    request.average = one.average;
    request.unfused = one.unfused;
    request.tolerance = one.check ? 0.01 : 0.0;
    const bool sums = one.kind == Request::Kind::kAllReduce;
    if (one.gathers()) {
      request.op_name = "AllGather";
      ddl::TensorBuffer buffer;
      buffer.in = in_.data();
      buffer.count = one.counts[rank_] * one.columns;
      buffer.dims = {one.counts[rank_], one.columns};
      FillBytes(in_.data(), buffer.count * element, one.index, rank_);
      std::memset(in_.data() + buffer.count * element, kGuardByte, kGuard);
      std::fill(out_.begin(), out_.begin() + GatheredBytes() + kGuard, kGuardByte);
      request.tensors.push_back(buffer);
      request.allocate = [this](const std::vector<int64_t>& sizes, void** memory) {
        if (sizes != one_->counts) return ddl::Status(ddl::Code::kInternal, "wrong sizes");
        *memory = out_.data();
        return ddl::Status();
      };
    } else {
      request.op_name = !sums ? "Bcast" : one.counts.size() == 1 ? "AllReduce" : "AllReduceN";
      for (size_t i = 0; i < one.counts.size(); ++i) {
        ddl::TensorBuffer buffer;
        unsigned char* in = in_.data() + one.offsets[i];
        unsigned char* out = (one.in_place ? in_ : out_).data() + one.offsets[i];
        const int64_t nbytes = one.counts[i] * element;
        std::memset(out, kGuardByte, nbytes + kGuard);
        std::memset(in + nbytes, kGuardByte, kGuard);
        if (sums) {
          Fill(in, one.counts[i], one.dtype, one.index + static_cast<int64_t>(i), rank_, size_);
        } else {
          FillBytes(in, nbytes, one.index, rank_);
        }
        buffer.in = in;
        buffer.out = out;
        buffer.count = one.counts[i];
        buffer.dims = {one.counts[i]};
        request.tensors.push_back(buffer);
      }
    }
    finished_ = std::promise<ddl::Status>();
    request.done = [this](const ddl::Status& status) { finished_.set_value(status); };
    if (one.mistake != Mistake::kNone) untouched_ = Hash();
    if (rank_ == one.mistaken) Err(&request);
    const bool cancelled = request.IsCancelled();
    ddl::Engine::Get().Submit(std::move(request));
    if (cancelled) ddl::Engine::Get().NotifyCancelled();
  }

  ddl::Status Wait() {
    std::future<ddl::Status> future = finished_.get_future();
    if (future.wait_for(kHangLimit) == std::future_status::ready) return future.get();
    return ddl::Status(ddl::Code::kDeadlineExceeded, Name() + ": hangs");
  }

  // What is wrong with the error that a mistake should have led to, or nothing.
  std::string CheckError(const ddl::Status& status) const {
    const std::string where = Name() + " with mistake " +
                              std::to_string(static_cast<int>(one_->mistake)) + " of rank " +
                              std::to_string(one_->mistaken) + ": ";
    if (status.ok()) return where + "no error";
    if (status.message().find("collective " + std::to_string(one_->index % kSlots)) ==
        std::string::npos) {
      return where + "an error that does not name it: " + status.message();
    }
    // A rank that has cancelled knows it.
    const bool knows = one_->mistake == Mistake::kCancelled && rank_ == one_->mistaken;
    if (!knows &&
        status.message().find("rank " + std::to_string(one_->mistaken)) == std::string::npos) {
      return where + "an error that does not name the rank: " + status.message();
    }
    return Hash() == untouched_ ? "" : where + "wrote a result";
  }

  // What is wrong, or nothing. Adds to the number of elements checked.
  std::string Check(int64_t* elements) {
    const Collective& one = *one_;
    const int64_t element = Size(one.dtype);
    if (one.gathers()) {
      const unsigned char* part = out_.data();
      for (int rank = 0; rank < size_; ++rank) {
        const int64_t nbytes = one.counts[rank] * one.columns * element;
        if (const int64_t at = FindWrongByte(part, nbytes, one.index, rank); at >= 0) {
          return Name() + ": byte " + std::to_string(at) + " of rank " + std::to_string(rank);
        }
        *elements += one.counts[rank] * one.columns;
        part += nbytes;
      }
      return GuardedAt(part) ? "" : Name() + ": wrote behind the result";
    }
    for (size_t i = 0; i < one.counts.size(); ++i) {
      const unsigned char* in = in_.data() + one.offsets[i];
      const unsigned char* out = (one.in_place ? in_ : out_).data() + one.offsets[i];
      const int64_t nbytes = one.counts[i] * element, index = one.index + static_cast<int64_t>(i);
      const int64_t at =
          one.kind == Request::Kind::kBroadcast
              ? FindWrongByte(out, nbytes, one.index, one.root)
              : FindWrong(out, one.counts[i], one.dtype, index, size_, one.average);
      const std::string where = Name() + ": tensor " + std::to_string(i) + " of " +
                                std::to_string(one.counts.size()) + " with " +
                                std::to_string(one.counts[i]) + " elements";
      if (at >= 0) return where + ": [" + std::to_string(at) + "]";
      if (!GuardedAt(out + nbytes) || !GuardedAt(in + nbytes)) return where + ": wrote behind it";
      *elements += one.counts[i];
    }
    return "";
  }

  // Of the result.
  uint64_t Hash() const {
    uint64_t hash = 14695981039346656037u;
    if (one_->gathers()) return HashOf(out_.data(), GatheredBytes(), hash);
    for (size_t i = 0; i < one_->counts.size(); ++i) {
      hash = HashOf((one_->in_place ? in_ : out_).data() + one_->offsets[i],
                    one_->counts[i] * Size(one_->dtype), hash);
    }
    return hash;
  }

 private:
  // Makes the mistake of this collective.
  void Err(Request* request) const {
    ddl::TensorBuffer& last = request->tensors.back();
    switch (one_->mistake) {
      case Mistake::kNone: return;
      case Mistake::kShape:
        last.dims.back() += 1;
        last.count = 1;
        for (const int64_t dim : last.dims) last.count *= dim;
        return;
      case Mistake::kDtype:
        request->dtype = one_->dtype == DType::kFloat32 ? DType::kInt32 : DType::kFloat32;
        return;
      case Mistake::kName: request->name += " misnamed"; return;
      case Mistake::kRoot: request->root = (one_->root + 1) % size_; return;
      case Mistake::kRaised:
        request->allocate = [](const std::vector<int64_t>&, void**) {
          return ddl::Status(ddl::Code::kInternal, "as asked");
        };
        return;
      case Mistake::kCancelled:
        request->cancelled = std::make_shared<std::atomic<bool>>(true);
        return;
    }
  }

  std::string Name() const {
    const char* kinds[] = {"broadcast", "allreduce", "allgather"};
    return "collective " + std::to_string(one_->index) + " (" +
           kinds[static_cast<int>(one_->kind)] + (one_->average ? ", average" : "") +
           (one_->in_place ? ", in place" : "") + (one_->unfused ? ", unfused" : "") + ") of " +
           ddl::DTypeName(one_->dtype);
  }

  int64_t GatheredBytes() const {
    int64_t rows = 0;
    for (const int64_t count : one_->counts) rows += count;
    return rows * one_->columns * Size(one_->dtype);
  }

  static bool GuardedAt(const unsigned char* memory) {
    return std::all_of(memory, memory + kGuard, [](unsigned char c) { return c == kGuardByte; });
  }

  const int rank_, size_;
  const int64_t nbytes_;
  std::vector<unsigned char> in_, out_;
  const Collective* one_ = nullptr;
  uint64_t untouched_ = 0;  // the hash of what stands where the result would
  std::promise<ddl::Status> finished_;
};

// The largest resident set and number of open files in the first and in the last quarter.
class Footprint {
 public:
  void Sample(int64_t done, int64_t all) {
    const int quarter = static_cast<int>(done * 4 / std::max<int64_t>(all, 1));
    if (quarter != 0 && quarter < 3) return;
    int64_t virtual_pages = 0, pages = 0;
    std::ifstream("/proc/self/statm") >> virtual_pages >> pages;
    const int64_t files = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
    const int which = quarter == 0 ? 0 : 1;
    kib_[which] = std::max(kib_[which], pages * getpagesize() / 1024);
    files_[which] = std::max(files_[which], files);
  }

  std::string Text() const {
    return "kib " + std::to_string(kib_[0]) + " " + std::to_string(kib_[1]) + " files " +
           std::to_string(files_[0]) + " " + std::to_string(files_[1]);
  }

 private:
  int64_t kib_[2] = {0, 0}, files_[2] = {0, 0};
};

class Options {
 public:
  Options(int argc, char** argv) {
    for (int i = 2; i < argc; ++i) {
      const std::string word = argv[i];
      const size_t equals = word.find('=');
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }

  std::string Text(const std::string& name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? "" : found->second;
  }
  int64_t Number(const std::string& name, int64_t otherwise) const {
    return Text(name).empty() ? otherwise : std::stoll(Text(name));
  }

 private:
  std::map<std::string, std::string> values_;
};

// As an uncaught error ends a script (all ranks), or this process alone, at once.
[[noreturn]] void End(bool alone, int code) {
  if (alone) _exit(code);
  ddl::MpiSession::Abort(code);
}

}  // namespace

int Soak(int argc, char** argv) {
  const Options options(argc, argv);
  const char* place = std::getenv("OMPI_COMM_WORLD_RANK");
  const std::string folder = options.Text("folder");
  Journal journal(folder.empty() ? "" : folder + "/rank-" + (place != nullptr ? place : "0"));
  if (!folder.empty()) {
    alarm(120);  // else it would outlive a test that is killed itself
    journal.Say("pid %d", getpid());
  }
  ddl::Topology topology;
  const bool alone = options.Number("alone", 0) != 0;
  if (const ddl::Status status = ddl::Engine::Get().Start(&topology); !status.ok()) {
    journal.Say("error %d %s", static_cast<int>(status.code()), status.message().c_str());
    return kFailed;
  }
  const int rank = topology.rank, size = topology.size;
  if (!folder.empty()) journal.Say("started");
  // Freed memory goes back at once: what stays is in use.
  mallopt(M_TRIM_THRESHOLD, 0);
  mallopt(M_MMAP_THRESHOLD, 64 << 10);

  const int64_t seed = options.Number("seed", 1), all = options.Number("collectives", 1000);
  const int64_t most_bytes = options.Number("bytes", 4 << 20);
  const bool shuffle = options.Number("shuffle", 0) != 0, say = !folder.empty();
  const int64_t wrong_every = options.Number("wrong", 0);
  Random common(seed), own(seed * 1000 + rank + 1);
  std::vector<std::unique_ptr<Slot>> slots;
  for (int i = 0; i < kSlots; ++i) slots.push_back(std::make_unique<Slot>(most_bytes, rank, size));
  Footprint footprint;
  int64_t done = 0, elements = 0, mistakes = 0, next_sample = 0;
  while (done < all) {
    std::vector<Collective> batch;
    int64_t want = std::min<int64_t>(1 + common() % kSlots, all - done);
    for (int64_t i = 0; i < want; ++i) {
      batch.push_back(RandomCollective(common, done + i, most_bytes, size, alone));
      if (wrong_every == 0 || common() % wrong_every != 0) continue;
      MakeWrong(common, /*ordered=*/!shuffle, /*alone=*/i == 0, size, &batch.back());
      if (batch.back().mistake == Mistake::kCancelled) want = 1;
    }
    std::vector<int64_t> order(batch.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    if (shuffle) std::shuffle(order.begin(), order.end(), own);
    for (const int64_t i : order) {
      if (own() % 500 == 0) usleep(own() % 3000);
      if (own() % 10000 == 0) usleep(own() % 200000);
      slots[i]->Submit(batch[i], /*ordered=*/!shuffle);
    }
    for (size_t i = 0; i < batch.size(); ++i) {
      const ddl::Status status = slots[i]->Wait();
      if (batch[i].mistake != Mistake::kNone) {
        if (const std::string wrong = slots[i]->CheckError(status); !wrong.empty()) {
          journal.Say("WRONG on rank %d: %s", rank, wrong.c_str());
          End(alone, kWrong);
        }
        ++mistakes;
        continue;
      }
      if (!status.ok()) {
        journal.Say("error %d %s", static_cast<int>(status.code()), status.message().c_str());
        End(alone, kFailed);
      }
      if (const std::string wrong = slots[i]->Check(&elements); !wrong.empty()) {
        journal.Say("WRONG on rank %d: %s", rank, wrong.c_str());
        End(alone, kWrong);
      }
      if (say) journal.Say("%lld %llx", static_cast<long long>(batch[i].index),
                           static_cast<unsigned long long>(slots[i]->Hash()));
    }
    done += want;
    if (done >= next_sample) {
      footprint.Sample(done - 1, all);
      next_sample += std::max<int64_t>(all / 400, 1);
    }
  }
  journal.Say("done rank %d collectives %lld mistakes %lld elements %lld %s", rank,
              static_cast<long long>(done), static_cast<long long>(mistakes),
              static_cast<long long>(elements), footprint.Text().c_str());
  ddl::Engine::Get().Leave();
  if (say) journal.Say("left");
  return 0;
}

int OneLarge(int argc, char** argv) {
  const Options options(argc, argv);
  ddl::Topology topology;
  if (!ddl::Engine::Get().Start(&topology).ok()) return kFailed;
  const int rank = topology.rank, size = topology.size;
  const std::string kind = options.Text("kind");
  const int64_t count = options.Number("count", 0);
  Request request;
  request.name = "large";
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kInt32, DType::kFloat16,
                            DType::kBfloat16, DType::kInt8}) {
    if (options.Text("dtype") == ddl::DTypeName(dtype)) request.dtype = dtype;
  }
  const int64_t nbytes = count * Size(request.dtype);
  const auto allocate = [](int64_t n) { return std::unique_ptr<unsigned char[]>(new unsigned char[n]); };
  const std::unique_ptr<unsigned char[]> memory = allocate(nbytes);
  std::unique_ptr<unsigned char[]> gathered;
  ddl::TensorBuffer buffer;
  buffer.in = buffer.out = memory.get();
  buffer.count = count;
  buffer.dims = {count};
  if (kind == "allreduce") {
    request.op_name = "AllReduce";
    Fill(memory.get(), count, request.dtype, 1, rank, size);
  } else {
    FillBytes(memory.get(), nbytes, 1, rank);
    request.kind = kind == "broadcast" ? Request::Kind::kBroadcast : Request::Kind::kAllGather;
    request.op_name = kind == "broadcast" ? "Bcast" : "AllGather";
    request.allocate = [&](const std::vector<int64_t>& sizes, void** out) {
      gathered = allocate(nbytes * static_cast<int64_t>(sizes.size()));
      *out = gathered.get();
      return ddl::Status();
    };
  }
  request.tensors.push_back(buffer);
  std::promise<ddl::Status> finished;
  request.done = [&finished](const ddl::Status& status) { finished.set_value(status); };
  const DType dtype = request.dtype;
  ddl::Engine::Get().Submit(std::move(request));
  const ddl::Status status = finished.get_future().get();
  if (!status.ok()) {
    std::printf("%s\n", status.message().c_str());
    return kFailed;
  }
  int64_t at = -1;
  if (kind == "allreduce") at = FindWrong(memory.get(), count, dtype, 1, size, false);
  if (kind == "broadcast") at = FindWrongByte(memory.get(), nbytes, 1, 0);
  if (kind == "allgather") {
    for (int peer = 0; peer < size && at < 0; ++peer) {
      at = FindWrongByte(gathered.get() + peer * nbytes, nbytes, 1, peer);
    }
  }
  if (at >= 0) {
    std::printf("WRONG on rank %d: [%lld]\n", rank, static_cast<long long>(at));
    return kWrong;
  }
  std::printf("exact on rank %d\n", rank);
  return 0;
}
