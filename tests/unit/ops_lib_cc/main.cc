#include <chrono>
#include <cstring>

#include "check.h"
#include "core/vector.h"

int main(int count, char** arguments) {
  std::printf("vectors: %s\n", ddl::VectorInstructions());
  for (const Test& test : Tests()) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted = wanted || std::strstr(test.name, arguments[i]);
    if (!wanted) continue;
    const int before = failed_checks;
    const auto start = std::chrono::steady_clock::now();
    test.run();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %s (%.2f s)\n", failed_checks == before ? "ok    " : "FAILED", test.name,
                seconds);
    std::fflush(stdout);
  }
  return failed_checks == 0 ? 0 : 1;
}
