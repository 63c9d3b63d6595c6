#ifndef DDL_TESTS_ALLOCATIONS_H_
#define DDL_TESTS_ALLOCATIONS_H_

#include <atomic>
#include <cstddef>

// Says of an allocation of so many bytes by operator new, in any thread, whether it fails. Null: none
// does.
extern std::atomic<bool (*)(std::size_t nbytes)> allocation_fails;

#endif  // DDL_TESTS_ALLOCATIONS_H_
