#include "runtime/engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "comm/mpi_connect.h"
#include "core/log.h"
#include "runtime/description.h"
#include "runtime/gather.h"

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// How long a request that is expected next may keep another waiting: about what it costs to agree
// on another order, so that at worst a wrong guess costs that twice.
constexpr std::chrono::microseconds kPatience{200};
// How often a rank that lacks rank 0's choice looks whether the others still wait for it.
constexpr std::chrono::milliseconds kLackPeriod{1};

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

bool Engine::ReachesGpus() {
  std::lock_guard<std::mutex> lock(mutex_);
  return opened_ && state_ == State::kRunning && reaches_gpus_;
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
    reaches_gpus_ = gpus_ != nullptr;
    if (!opened.ok()) state_ = State::kFailed;
    changed_.notify_all();
  }
  if (opened.ok()) Serve();
  gpus_.reset();
  communicator_.reset();
  session_.Close();
}

Status Engine::Open() {
  DDL_RETURN_IF_ERROR(ReadConfig(&config_));
  DDL_RETURN_IF_ERROR(session_.Open());
  DDL_RETURN_IF_ERROR(Connect(config_, &communicator_));
  std::string no_gpus;
  DDL_RETURN_IF_ERROR(ConnectGpus(config_.gpu_transport, config_.stall_timeout_s,
                                  communicator_.get(), &gpus_, &no_gpus));
  topology_ = {communicator_->rank(), communicator_->size(), communicator_->local_rank(),
               communicator_->local_size()};
  if (config_.log_info) {
    LogLine(topology_.rank, "of " + std::to_string(topology_.size) + ", local rank " +
                                std::to_string(topology_.local_rank) + " of " +
                                std::to_string(topology_.local_size) + ", over " +
                                communicator_->Means());
    LogLine(topology_.rank, gpus_ != nullptr
                                ? "tensors of GPUs over NCCL"
                                : "tensors of GPUs through the host's memory: " + no_gpus);
  }
  return recorder_.Open(config_, communicator_.get());
}

void Engine::Serve() {
  negotiator_ = std::make_unique<Negotiator>(topology_.size == 1);
  agreement_ = std::make_unique<Agreement>(communicator_.get(), negotiator_.get(),
                                           config_.stall_timeout_s);
  allreduce_ = std::make_unique<FusedAllReduce>(communicator_.get());
  std::optional<Clock::time_point> first_shown;  // since the last collective
  while (const Request* shown = NextTurn()) {
    if (!first_shown) first_shown = Clock::now();
    Passage passage{*shown};
    // Where rank 0 had to choose, its choice is what all were waiting for; but a rank that had not
    // submitted it yet was not waiting.
    passage.turn = std::max(*first_shown, shown->submitted);
    Accord accord = Accord::kRun;
    passage.status = RunTogether(&passage, &accord);
    if (passage.status.ok() && accord == Accord::kAnotherFirst) {
      LogChoice(*shown);
      continue;
    }
    passage.end = Clock::now();
    first_shown.reset();
    recorder_.Add(passage);
    const Request request = negotiator_->Take();
    if (!passage.status.ok() && !request.ordered &&
        passage.status.code() != Code::kUnavailable) {
      agreement_->Break(passage.status);
    }
    request.done(passage.status);
  }
  recorder_.Flush();
  const Status left = agreement_->Leave();  // an error is for those who stay
  allreduce_.reset();
  agreement_.reset();
  negotiator_.reset();
  recorder_.Close(left.ok());
}

void Engine::TakeSubmitted() {
  for (Request& request : queue_) negotiator_->Add(std::move(request));
  queue_.clear();
}

const Request* Engine::NextTurn() {
  if (negotiator_->HasChoice()) {
    if (const Request* chosen = ChosenTurn()) return chosen;
    negotiator_->Follow({});
  }
  const auto news = [this] { return !queue_.empty() || state_ == State::kLeaving; };
  std::unique_lock<std::mutex> lock(mutex_);
  TakeSubmitted();
  if (negotiator_->empty()) {
    changed_.wait(lock, news);
    TakeSubmitted();
  }
  const Clock::time_point impatient = Clock::now() + kPatience;
  while (!negotiator_->empty()) {
    if (const Request* shown = negotiator_->Show(/*patient=*/true)) return shown;
    if (!changed_.wait_until(lock, impatient, news) || queue_.empty()) {
      return negotiator_->Show(/*patient=*/false);
    }
    TakeSubmitted();
  }
  return nullptr;
}

const Request* Engine::ChosenTurn() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    TakeSubmitted();
    if (const Request* shown = negotiator_->Show(/*patient=*/true)) return shown;
    const bool leaving = state_ == State::kLeaving;  // then nothing more will be submitted
    lock.unlock();
    if (leaving) {
      (void)agreement_->Leave();
      return nullptr;
    }
    if (!agreement_->Lack().ok()) return nullptr;
    lock.lock();
    changed_.wait_for(lock, kLackPeriod, [this] { return !queue_.empty(); });
  }
}

void Engine::LogChoice(const Request& shown) const {
  if (!config_.log_info) return;
  const std::string ours = Title(shown);
  if (ours == negotiator_->choice().title) return;
  LogLine(topology_.rank, "order: " + negotiator_->choice().title + " of rank 0 before " + ours);
}

Status Engine::RunTogether(Passage* passage, Accord* accord) {
  const Request& request = passage->request;
  SmallTensor small;
  const bool packed = allreduce_->Pack(request, &small);
  const Status agreed = agreement_->Agree(request, packed ? &small : nullptr, accord);
  passage->agreed = Clock::now();
  passage->nbytes = Nbytes(request);
  passage->packed = agreed.ok() && *accord == Accord::kSummed;
  if (passage->packed) {
    allreduce_->Unpack(request);
    return agreed;
  }
  allreduce_->Forget();
  return agreed.ok() && *accord == Accord::kRun ? Move(request, &passage->nbytes) : agreed;
}

Status Engine::MoveOnGpus(const Request& request, int64_t* nbytes) {
  const TensorBuffer& first = request.tensors[0];
  if (gpus_ == nullptr) {
    return Status(Code::kFailedPrecondition,
                  "NCCL cannot be used on all ranks (DDL_LOG=info says why). Set DDL_GPU=host, or "
                  "put the op on /CPU:0.");
  }
  switch (request.kind) {
    case Request::Kind::kBroadcast:
      return gpus_->Broadcast(*request.place, first.in, first.out, *nbytes, request.root);
    case Request::Kind::kAllGather:
      return Gather(communicator_.get(), gpus_.get(), request, nbytes);
    case Request::Kind::kAllReduce: break;
  }
  std::vector<NcclCommunicator::Tensor> tensors;
  for (const TensorBuffer& one : request.tensors) tensors.push_back({one.in, one.out, one.count});
  return gpus_->AllReduce(*request.place, tensors, request.dtype, request.average);
}

Status Engine::Move(const Request& request, int64_t* nbytes) {
  if (request.place != nullptr) {
    const Status moved = MoveOnGpus(request, nbytes);
    if (moved.ok() || moved.message().rfind(Title(request), 0) == 0) return moved;
    return Status(moved.code(), Title(request) + " on the GPU of rank " +
                                    std::to_string(topology_.rank) + ": " + moved.message());
  }
  switch (request.kind) {
    case Request::Kind::kBroadcast:
      return communicator_->Broadcast(request.tensors[0].out, *nbytes, request.root);
    case Request::Kind::kAllGather:
      return Gather(communicator_.get(), gpus_.get(), request, nbytes);
    case Request::Kind::kAllReduce: break;
  }
  return allreduce_->Run(request);
}

}  // namespace ddl
