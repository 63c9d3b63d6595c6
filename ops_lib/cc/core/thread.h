#ifndef DDL_CORE_THREAD_H_
#define DDL_CORE_THREAD_H_

#include <functional>
#include <string>
#include <thread>

namespace ddl {

// A thread of the library's own, which runs `run`. It gets no signals but those of its own faults:
// they are for the threads of the script. It computes by the default floating-point environment:
// threads of TensorFlow, which may start it, take subnormal numbers for zeros. Throws
// std::system_error where a limit leaves no room for one more.
//
// `name`: as ps and top show it; at most 15 characters.
std::thread StartThread(const std::string& name, std::function<void()> run);

}  // namespace ddl

#endif  // DDL_CORE_THREAD_H_
