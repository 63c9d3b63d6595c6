#ifndef DDL_CORE_LOG_H_
#define DDL_CORE_LOG_H_

#include <cstdio>
#include <string>

namespace ddl {

// One line to stderr, which mpirun brings to the job's log. Written at once, so that lines of
// several ranks do not mix.
inline void LogLine(int rank, const std::string& message) {
  const std::string line = "ddl: rank " + std::to_string(rank) + ": " + message + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace ddl

#endif  // DDL_CORE_LOG_H_
