#include <chrono>
#include <clocale>
#include <cstring>

#include "check.h"
#include "core/vector.h"

int main(int count, char** arguments) {
  std::setlocale(LC_NUMERIC, "");  // as a script may
  std::printf("vectors: %s, decimal point: %s\n", ddl::VectorInstructions(),
              std::localeconv()->decimal_point);
  for (const Test& test : Tests()) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted = wanted || std::strstr(test.name, arguments[i]);
    if (!wanted) continue;
    const int before = failed_checks;
    pace = 1;
    for (int attempt = 1;; ++attempt, pace *= 4) {
      const auto start = std::chrono::steady_clock::now();
      test.run();
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      const bool failed = failed_checks != before, again = failed && attempt < test.attempts;
      std::printf("%s %s (%.2f s)\n", again ? "again " : failed ? "FAILED" : "ok    ", test.name,
                  seconds);
      std::fflush(stdout);
      if (!again) break;
      failed_checks = before;
    }
  }
  return failed_checks == 0 ? 0 : 1;
}
