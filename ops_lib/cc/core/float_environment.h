#ifndef DDL_CORE_FLOAT_ENVIRONMENT_H_
#define DDL_CORE_FLOAT_ENVIRONMENT_H_

#include <cfenv>

namespace ddl {

// As long as it lives, this thread computes by the default floating-point environment. Threads of
// TensorFlow take subnormal numbers for zeros: what one rank computes there and another in a thread
// of the library's own (core/thread.h) would differ.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  ~DefaultFloatEnvironment() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

}  // namespace ddl

#endif  // DDL_CORE_FLOAT_ENVIRONMENT_H_
