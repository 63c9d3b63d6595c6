#ifndef DDL_CORE_WORKER_H_
#define DDL_CORE_WORKER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "core/status.h"

namespace ddl {

// A thread (see core/thread.h) that runs the tasks of another one, one after the other, and sleeps
// between them. One thread uses it.
//
// fork copies the memory, not the thread: in a child it does nothing, and must not be destroyed.
class Worker {
 public:
  using Task = std::function<Status()>;

  // `name`: of the thread, as ps and top show it; at most 15 characters.
  explicit Worker(const std::string& name);
  Worker(const Worker&) = delete;
  // Waits until all is done.
  ~Worker();

  // Hands `task` over and returns at once.
  void Submit(Task task);

  // How many were handed over and not awaited.
  int64_t pending() const { return submitted_ - awaited_; }

  // Waits for the oldest of these, for so long at most. False: it is not done. `status`: what it
  // has returned; Internal if it has thrown.
  bool Await(double at_most_s, Status* status);

 private:
  void Run();

  int64_t submitted_ = 0, awaited_ = 0;
  std::atomic<int64_t> done_{0};

  std::mutex mutex_;  // guards all up to thread_
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::deque<Status> statuses_;  // of what is done and not awaited
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace ddl

#endif  // DDL_CORE_WORKER_H_
