#ifndef DDL_TESTS_CHECK_H_
#define DDL_TESTS_CHECK_H_

#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

// A test is a function between braces after TEST(name); main runs those whose name contains one of
// the arguments, or all. A failed CHECK prints where and what and goes on.
struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline std::atomic<int> failed_checks{0};

inline void Fail(const char* file, int line, const std::string& what) {
  if (++failed_checks > 20) return;  // of a loop, the first ones tell enough
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

#define TEST(test)                                                     \
  static void test();                                                  \
  static const bool test##_added = (Tests().push_back({#test, test}), true); \
  static void test()

#define CHECK(condition, what)                                                              \
  do {                                                                                      \
    if (!(condition)) Fail(__FILE__, __LINE__, std::string(#condition) + " is false: " + (what)); \
  } while (false)

#endif  // DDL_TESTS_CHECK_H_
