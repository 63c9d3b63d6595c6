#include "core/worker.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <chrono>
#include <exception>
#include <utility>

#include "core/backoff.h"

namespace ddl {
namespace {

// Some 10 microseconds: helpers mostly end when their caller does.
constexpr int kSpins = 300;

}  // namespace

Worker::Worker(const std::string& name) {
  // The new thread inherits the mask, so that none can reach it before it has its own.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread([this, name] {
      // Else the kernel rounds its short sleeps up by 50 microseconds.
      prctl(PR_SET_TIMERSLACK, 1000UL);
      prctl(PR_SET_NAME, name.c_str());
      Run();
    });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

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
