#ifndef DDL_TESTS_CHECK_H_
#define DDL_TESTS_CHECK_H_

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

// A test is a function between braces after TEST(name); main runs those whose name contains one of
// the arguments, or all. A failed CHECK prints where and what and goes on.
//
// What TIMED_TEST(name) holds is true of ranks that get a processor in time. If it fails it runs
// again, with each of its times four times as long, and once more: on a busy machine it takes
// longer, and what is wrong fails at every pace.
struct Test {
  const char* name;
  void (*run)();
  int attempts;
};

inline int pace = 1;

// Of a TIMED_TEST, whose other times are those of what it starts.
inline double Paced(double seconds) { return seconds * pace; }

inline void SleepFor(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(Paced(seconds)));
}

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline std::atomic<int> failed_checks{0};

inline void Fail(const char* file, int line, const std::string& what) {
  if (++failed_checks > 20) return;  // of a loop, the first ones tell enough
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

#define TEST_OF(test, attempts)                                                        \
  static void test();                                                                  \
  static const bool test##_added = (Tests().push_back({#test, test, attempts}), true); \
  static void test()
#define TEST(test) TEST_OF(test, 1)
#define TIMED_TEST(test) TEST_OF(test, 3)

#define CHECK(condition, what)                                                              \
  do {                                                                                      \
    if (!(condition)) Fail(__FILE__, __LINE__, std::string(#condition) + " is false: " + (what)); \
  } while (false)

#endif  // DDL_TESTS_CHECK_H_
