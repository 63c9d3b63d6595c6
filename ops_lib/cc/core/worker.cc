#include "core/worker.h"

#include <chrono>
#include <exception>
#include <utility>

#include "core/backoff.h"
#include "core/thread.h"

namespace ddl {
namespace {

// Some 10 microseconds: helpers mostly end when their caller does.
constexpr int kSpins = 300;

}  // namespace

Worker::Worker(const std::string& name) : thread_(StartThread(name, [this] { Run(); })) {}

Worker::~Worker() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Worker::Submit(Task task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(task));
  }
  ++submitted_;
  changed_.notify_all();
}

bool Worker::Await(double at_most_s, Status* status) {
  for (int i = 0; i < kSpins && done_.load() <= awaited_; ++i) CpuRelax();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::duration<double>(at_most_s),
                         [this] { return !statuses_.empty(); })) {
    return false;
  }
  *status = std::move(statuses_.front());
  statuses_.pop_front();
  ++awaited_;
  return true;
}

void Worker::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Status status;
    try {
      status = task();
    } catch (const std::exception& error) {
      status = Status(Code::kInternal, std::string("a thread could not go on: ") + error.what());
    }
    lock.lock();
    statuses_.push_back(std::move(status));
    done_.fetch_add(1);
    changed_.notify_all();
  }
}

}  // namespace ddl
