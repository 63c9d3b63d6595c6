#include "runtime/engine.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
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

// Requests of a run that has failed may still be submitted, by an executor that does not know yet.
constexpr size_t kRunsRemembered = 256;

// fork copies the engine's memory, not its thread.
std::atomic<bool> in_child{false};

const Status& ChildIsNoRank() {
  static const Status status(
      Code::kFailedPrecondition,
      "this process is a forked child of a rank, and no rank itself: it can neither start ddl nor "
      "run collectives. Do that in the process that the launcher started.");
  return status;
}

// Answers a request also if it gets lost, because there was no memory to keep it.
class Answer {
 public:
  explicit Answer(std::function<void(const Status&)> done) : done_(std::move(done)) {}
  Answer(const Answer&) = delete;
  ~Answer() {
    if (done_) done_(Status(Code::kInternal, "no memory"));
  }

  void Give(const Status& status) { std::exchange(done_, nullptr)(status); }

 private:
  std::function<void(const Status&)> done_;
};

// "`what`: `error`"; where there is no memory for that, it is so short that it needs none.
Status Failure(const char* what, const std::exception& error) {
  try {
    return Status(Code::kInternal, std::string(what) + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return Status(Code::kInternal, "no memory");
  }
}

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

Engine::Engine() : session_([this] { Leave(); }) {
  notice_.kind = Request::Kind::kNotice;
  notice_.op_name = "Notice";
  pthread_atfork(nullptr, nullptr, [] { in_child.store(true); });
}

Status Engine::Start(Topology* topology) {
  if (in_child.load()) return ChildIsNoRank();
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
  if (in_child.load()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!opened_ || state_ != State::kRunning) return false;
  *topology = topology_;
  return true;
}

bool Engine::ReachesGpus() {
  if (in_child.load()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return opened_ && state_ == State::kRunning && reaches_gpus_;
}

void Engine::Submit(Request request) {
  if (in_child.load()) {
    request.done(Status(ChildIsNoRank().code(), Title(request) + ": " + ChildIsNoRank().message()));
    return;
  }
  if (request.signature == nullptr) request.signature = Sign(request);
  Status why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::kRunning) {
      request.submitted = Clock::now();
      const auto answer = std::make_shared<Answer>(std::move(request.done));
      request.done = [answer](const Status& status) { answer->Give(status); };
      queue_.push_back(std::move(request));
      changed_.notify_all();
      return;
    }
    why = start_status_;
  }
  if (why.ok()) {
    why = Status(Code::kFailedPrecondition,
                 Title(request) +
                     ": ddl is not running. Call ddl.init (op Init) before the first collective, "
                     "and none after the shutdown.");
  }
  request.done(why);
}

void Engine::Withdraw() {
  if (in_child.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  withdrawals_ = true;
  changed_.notify_all();
}

void Engine::Leave() {
  if (in_child.load()) return;
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
  Status opened;
  try {
    opened = Open();
  } catch (const std::exception& error) {
    opened = Failure("ddl could not start", error);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    start_status_ = opened;
    opened_ = true;
    reaches_gpus_ = gpus_ != nullptr;
    if (!opened.ok()) state_ = State::kFailed;
    changed_.notify_all();
  }
  if (opened.ok()) {
    Serve();
  } else {
    Refuse(opened);
  }
  gpus_.reset();
  if (MpiSession::HasAbandonedMessages()) (void)communicator_.release();
  communicator_.reset();
  session_.Close();
}

void Engine::Refuse(const Status& status) {
  std::deque<Request> refused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    refused.swap(queue_);
  }
  for (Request& request : refused) request.done(status);
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
  DDL_RETURN_IF_ERROR(recorder_.Open(config_, communicator_.get()));
  negotiator_ = std::make_unique<Negotiator>(topology_.size == 1);
  agreement_ = std::make_unique<Agreement>(
      communicator_.get(), negotiator_.get(), config_.stall_timeout_s, [this] {
        std::lock_guard<std::mutex> lock(mutex_);
        return !queue_.empty();
      });
  allreduce_ = std::make_unique<FusedAllReduce>(communicator_.get());
  could_not_go_on_ = "rank " + std::to_string(topology_.rank) + " could not go on";
  return Status();
}

void Engine::Persist(const std::function<void()>& step) {
  Status failure;
  while (true) {
    try {
      if (!failure.ok()) {
        communicator_->Break(failure);
        agreement_->Break(failure);
        failure = Status();
      }
      return step();
    } catch (const std::exception& error) {
      // Something of a request may be lost, so this rank cannot be in step again.
      failure = Failure(could_not_go_on_.c_str(), error);
      usleep(1000);  // memory may come back
    }
  }
}

void Engine::Serve() {
  std::optional<Clock::time_point> first_shown;
  Persist([this, &first_shown] {
    while (Request* shown = NextTurn()) ServeTurn(shown, &first_shown);
  });
  Status left;  // an error is for those who stay
  Persist([this, &left] {
    recorder_.Flush();
    left = agreement_->Leave();
  });
  if (MpiSession::HasAbandonedMessages()) (void)allreduce_.release();
  allreduce_.reset();
  agreement_.reset();
  negotiator_.reset();
  try {
    recorder_.Close(left.ok());
  } catch (const std::bad_alloc&) {
    std::fputs("ddl: no memory for the statistics\n", stderr);
  }
}

void Engine::ServeTurn(Request* shown, std::optional<Clock::time_point>* first_shown) {
  if (shown == &notice_) {
    Accord accord;
    (void)agreement_->Agree(notice_, nullptr, &accord);  // an error meets every request as well
    return;
  }
  if (!*first_shown) *first_shown = Clock::now();
  Passage passage{*shown};
  // Where rank 0 had to choose, its choice is what all were waiting for; but a rank that had not
  // submitted it yet was not waiting.
  passage.turn = std::max(**first_shown, shown->submitted);
  Accord accord;
  passage.status = RunTogether(shown, &passage, &accord);
  if (passage.status.ok() && accord.kind == Accord::Kind::kAgain) {
    LogChoice(*shown);
    return;
  }
  if (passage.status.ok() && shown->kind == Request::Kind::kJoin &&
      accord.kind != Accord::Kind::kAllJoined) {
    return;
  }
  if (shown->kind == Request::Kind::kJoin && passage.status.ok()) {
    shown->joined(accord.last_joined);
  }
  passage.end = Clock::now();
  first_shown->reset();
  if (shown->kind != Request::Kind::kJoin) recorder_.Add(passage);
  const std::function<void(const Status&)> done = [this, &passage] {
    Request request = negotiator_->Take();
    if (MpiSession::HasAbandonedMessages()) abandoned_->push_back(request.memory);
    if (!passage.status.ok()) {
      FailRun(request.run, passage.status);
    } else if (request.IsWithdrawn()) {
      GiveUp(request);  // too late for this one, but the others may still have more of the run
    }
    return std::move(request.done);  // first nothing holds the tensors any more
  }();
  done(passage.status);
}

bool Engine::HasFailed(int64_t run) const {
  return run != 0 && std::any_of(failed_runs_.begin(), failed_runs_.end(),
                                 [run](const FailedRun& failed) { return failed.run == run; });
}

void Engine::FailRun(int64_t run, const Status& status) {
  if (run == 0 || HasFailed(run)) return;
  failed_runs_.push_back({run, status});
  if (failed_runs_.size() > kRunsRemembered) failed_runs_.pop_front();
  for (Request& request : negotiator_->Extract([run](const Request& r) { return r.run == run; })) {
    request.done(status);
  }
}

void Engine::TakeSubmitted() {
  std::deque<Request> submitted;
  bool withdrawals = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    submitted.swap(queue_);
    std::swap(withdrawals, withdrawals_);
  }
  for (Request& request : submitted) {
    if (!HasFailed(request.run)) {
      withdrawals = withdrawals || request.IsWithdrawn();
      negotiator_->Add(std::move(request));
      continue;
    }
    for (const FailedRun& failed : failed_runs_) {
      if (failed.run == request.run) request.done(failed.status);
    }
  }
  if (withdrawals) DropWithdrawn();
}

void Engine::DropWithdrawn() {
  for (Request& request :
       negotiator_->Extract([](const Request& waiting) { return waiting.IsWithdrawn(); })) {
    GiveUp(request);
    request.done(Status(Code::kCancelled, Title(request) + ": its run was given up."));
  }
}

void Engine::GiveUp(const Request& request) {
  if (HasFailed(request.run)) return;
  agreement_->Withdraw("rank " + std::to_string(topology_.rank) + " has given up " +
                       Title(request) +
                       ", because something else failed in that step or cancelled it. See that "
                       "rank's log for the reason.");
  FailRun(request.run, Status(Code::kCancelled, Title(request) + ": its run was given up."));
}

bool Engine::Leaving() {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_ == State::kLeaving;
}

bool Engine::HasNews() const { return !queue_.empty() || withdrawals_; }

bool Engine::AwaitSubmission(std::optional<Clock::time_point> until) {
  const auto news = [this] { return HasNews() || state_ == State::kLeaving; };
  std::unique_lock<std::mutex> lock(mutex_);
  if (until) {
    changed_.wait_until(lock, *until, news);
  } else {
    changed_.wait(lock, news);
  }
  return HasNews();
}

Request* Engine::NextTurn() {
  if (negotiator_->HasChoice()) {
    if (Request* chosen = ChosenTurn()) return chosen;
    negotiator_->Follow({});
  }
  while (true) {
    TakeSubmitted();
    if (negotiator_->empty()) {
      // Whoever leaves says enough by that.
      if (agreement_->HasNotice() && !Leaving()) return &notice_;
      if (!AwaitSubmission(std::nullopt)) return nullptr;
      continue;
    }
    const Clock::time_point impatient = Clock::now() + kPatience;
    while (!negotiator_->empty()) {
      if (Request* shown = negotiator_->Show(/*patient=*/true)) return shown;
      if (!AwaitSubmission(impatient)) return negotiator_->Show(/*patient=*/false);
      TakeSubmitted();
    }
  }
}

Request* Engine::ChosenTurn() {
  while (true) {
    const bool leaving = Leaving();  // then nothing more will be submitted
    TakeSubmitted();
    if (Request* shown = negotiator_->Show(/*patient=*/true)) return shown;
    if (agreement_->HasNotice()) return &notice_;  // it may be what was chosen
    if (leaving) {
      (void)agreement_->Leave();
      return nullptr;
    }
    if (!agreement_->Lack().ok()) return nullptr;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kLackPeriod, [this] { return HasNews(); });
  }
}

void Engine::LogChoice(const Request& shown) const {
  if (!config_.log_info || !negotiator_->HasChoice()) return;
  const std::string ours = Title(shown);
  if (ours == negotiator_->choice().title) return;
  LogLine(topology_.rank, "order: " + negotiator_->choice().title + " of rank 0 before " + ours);
}

Status Engine::RunTogether(Request* request, Passage* passage, Accord* accord) {
  try {
    return RunAgreed(request, passage, accord);
  } catch (const std::exception& error) {
    // The other ranks are in the middle of it, or will be.
    const Status status(Code::kInternal,
                        Title(*request) + ": " + could_not_go_on_ + ": " + error.what());
    communicator_->Break(status);
    agreement_->Break(status);
    return status;
  }
}

Status Engine::RunAgreed(Request* request, Passage* passage, Accord* accord) {
  SmallTensor small;
  const bool packed = allreduce_->Pack(*request, &small);
  const Status agreed = agreement_->Agree(*request, packed ? &small : nullptr, accord);
  passage->agreed = Clock::now();
  passage->nbytes = Nbytes(*request);
  passage->packed = agreed.ok() && accord->kind == Accord::Kind::kSummed;
  if (passage->packed) {
    allreduce_->Unpack(*request);
    return agreed;
  }
  if (!agreed.ok() || accord->kind != Accord::Kind::kRun) return agreed;
  if (request->kind == Request::Kind::kJoin) return Contribute(*accord);
  request->contributors = accord->contributors;
  return Move(*request, &passage->nbytes);
}

Status Engine::Contribute(const Accord& accord) {
  Request theirs;
  if (const Status parsed = Parse(accord.description, &theirs); !parsed.ok()) {
    communicator_->Break(parsed);
    return parsed;
  }
  theirs.contributors = accord.contributors;
  const int64_t element = static_cast<int64_t>(DTypeSize(theirs.dtype));
  if (theirs.kind == Request::Kind::kAllGather) {
    for (TensorBuffer& tensor : theirs.tensors) {  // no rows of its own
      if (!tensor.dims.empty()) tensor.dims[0] = 0;
      tensor.count = 0;
    }
    theirs.allocate = [this, &theirs, element](const std::vector<int64_t>& sizes, void** out) {
      int64_t nbytes = element;
      for (size_t i = 1; i < theirs.tensors[0].dims.size(); ++i) {
        nbytes *= theirs.tensors[0].dims[i];
      }
      zeros_.resize(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) * nbytes);
      *out = zeros_.data();
      return Status();
    };
  } else {
    zeros_.assign(Nbytes(theirs), 0);
    char* at = zeros_.data();
    for (TensorBuffer& tensor : theirs.tensors) {
      tensor.in = tensor.out = at;
      at += tensor.count * element;
    }
  }
  int64_t nbytes = Nbytes(theirs);
  // An error is for those who asked. This rank goes on until all have joined; what is final meets it
  // in the next round.
  (void)Move(theirs, &nbytes);
  return Status();
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
    default: break;
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
    default: break;
  }
  return allreduce_->Run(request);
}

}  // namespace ddl
