#include "allocations.h"

#include <cstdlib>
#include <new>

std::atomic<bool (*)(std::size_t nbytes)> allocation_fails{nullptr};

void* operator new(std::size_t nbytes) {
  const auto fails = allocation_fails.load();
  void* const memory = fails != nullptr && fails(nbytes) ? nullptr : std::malloc(nbytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }

void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
