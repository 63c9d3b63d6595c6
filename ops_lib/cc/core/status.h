#ifndef DDL_CORE_STATUS_H_
#define DDL_CORE_STATUS_H_

#include <string>
#include <utility>

namespace ddl {

// The kinds of failure below tf/. tf/adapter.h maps them to TensorFlow's error types; the numbers
// travel between ranks, so they never change.
enum class Code : unsigned char {
  kOk = 0,
  kInvalidArgument = 1,     // ranks disagree about a tensor
  kFailedPrecondition = 2,  // not initialised, or a rank has left
  kDeadlineExceeded = 3,    // a rank did not come in time
  kInternal = 4,            // MPI or this library failed
  kAborted = 5,             // the process of a rank has died
  kUnavailable = 6,         // the other ranks wait with something else; the group goes on
  kCancelled = 7,           // the caller does not want it any more
  kInvalidInput = 8,        // what ranks give is wrong by itself, not only beside the others'
};

// What a call returns instead of throwing: no exception crosses a thread, the C ABI or TensorFlow.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace ddl

#define DDL_RETURN_IF_ERROR(expression)                                      \
  do {                                                                       \
    if (::ddl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

#endif  // DDL_CORE_STATUS_H_
