#include "runtime/engine.h"

#include <sys/prctl.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <utility>

#include "comm/shm_communicator.h"
#include "core/log.h"
#include "runtime/description.h"
#include "runtime/gather.h"

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// Of this rank's tensors.
int64_t Nbytes(const Request& request) {
  int64_t count = 0;
  for (const TensorBuffer& tensor : request.tensors) count += tensor.count;
  return count * static_cast<int64_t>(DTypeSize(request.dtype));
}

}  // namespace

Engine& Engine::Get() {
  static Engine* engine = new Engine;
  return *engine;
}

Engine::Engine() : session_([this] { Leave(); }) {}

Status Engine::Start(Topology* topology) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::kIdle) {
    state_ = State::kRunning;
    thread_ = std::thread([this] { Run(); });
    // mpirun reports a rank that ends without MPI_Finalize as a failure.
    std::atexit([] { Engine::Get().Leave(); });
  }
  changed_.wait(lock, [this] { return opened_; });
  if (start_status_.ok() && state_ != State::kRunning) {
    return Status(Code::kFailedPrecondition, "ddl was shut down and cannot start again.");
  }
  *topology = topology_;
  return start_status_;
}

bool Engine::Started(Topology* topology) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!opened_ || state_ != State::kRunning) return false;
  *topology = topology_;
  return true;
}

void Engine::Submit(Request request) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::kRunning) {
      request.submitted = Clock::now();
      queue_.push_back(std::move(request));
      changed_.notify_all();
      return;
    }
  }
  request.done(Status(Code::kFailedPrecondition,
                      request.op_name + " \"" + request.name +
                          "\": ddl is not running. Call ddl.init (op Init) before the first "
                          "collective, and none after the shutdown."));
}

void Engine::Leave() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::kIdle) return;
    // MPI_Finalize, called by our own thread, reports here as well.
    if (std::this_thread::get_id() == thread_.get_id()) return;
    if (state_ == State::kRunning) state_ = State::kLeaving;
    changed_.notify_all();
  }
  std::lock_guard<std::mutex> lock(leave_mutex_);
  if (thread_.joinable()) thread_.join();
}

void Engine::Run() {
  // Else the kernel rounds the short sleeps of a waiting rank up by 50 microseconds.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  prctl(PR_SET_NAME, "ddl-engine");
  const Status opened = Open();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    start_status_ = opened;
    opened_ = true;
    if (!opened.ok()) state_ = State::kFailed;
    changed_.notify_all();
  }
  if (opened.ok()) Serve();
  communicator_.reset();
  session_.Close();
}

Status Engine::Open() {
  DDL_RETURN_IF_ERROR(ReadConfig(&config_));
  DDL_RETURN_IF_ERROR(session_.Open(&communicator_));
  const char* transport = "MPI";
  DDL_RETURN_IF_ERROR(ShareMemory(config_.transport, config_.stall_timeout_s, &communicator_));
  if (communicator_->CanMeet()) transport = "shared memory";
  topology_ = {communicator_->rank(), communicator_->size(), communicator_->local_rank(),
               communicator_->local_size()};
  if (config_.log_info) {
    LogLine(topology_.rank, "of " + std::to_string(topology_.size) + ", local rank " +
                                std::to_string(topology_.local_rank) + " of " +
                                std::to_string(topology_.local_size) + ", over " + transport);
  }
  return recorder_.Open(config_, communicator_.get());
}

void Engine::Serve() {
  agreement_ = std::make_unique<Agreement>(communicator_.get(), config_.stall_timeout_s);
  allreduce_ = std::make_unique<FusedAllReduce>(communicator_.get());
  while (true) {
    Request request;
    if (!NextTurn(&request)) break;
    Passage passage{request};
    passage.turn = Clock::now();
    passage.status = RunTogether(&passage);
    passage.end = Clock::now();
    recorder_.Add(passage);
    request.done(passage.status);
  }
  recorder_.Flush();
  const Status left = agreement_->Leave();
  allreduce_.reset();
  agreement_.reset();
  recorder_.Close(left.ok());
}

bool Engine::NextTurn(Request* request) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !queue_.empty() || state_ == State::kLeaving; });
  if (queue_.empty()) return false;
  *request = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

Status Engine::RunTogether(Passage* passage) {
  const Request& request = passage->request;
  SmallTensor small;
  passage->packed = allreduce_->Pack(request, &small);
  const Status agreed = agreement_->Agree(Describe(request), passage->packed ? &small : nullptr);
  passage->agreed = Clock::now();
  passage->nbytes = Nbytes(request);
  if (!passage->packed) return agreed.ok() ? Move(request, &passage->nbytes) : agreed;
  if (agreed.ok()) {
    allreduce_->Unpack(request);
  } else {
    allreduce_->Forget();
  }
  return agreed;
}

Status Engine::Move(const Request& request, int64_t* nbytes) {
  switch (request.kind) {
    case Request::Kind::kBroadcast:
      return communicator_->Broadcast(request.tensors[0].out, *nbytes);
    case Request::Kind::kAllGather: return Gather(communicator_.get(), request, nbytes);
    case Request::Kind::kAllReduce: break;
  }
  return allreduce_->Run(request);
}

}  // namespace ddl
