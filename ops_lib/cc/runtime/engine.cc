#include "runtime/engine.h"

#include <pthread.h>
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
#include "core/thread.h"
#include "runtime/description.h"
#include "runtime/gather.h"
#include "runtime/process_sets.h"

namespace ddl {
namespace {

using Clock = std::chrono::steady_clock;

// How long a request that is expected next may keep another waiting: about what it costs to agree
// on another order, so that at worst a wrong guess costs that twice.
constexpr std::chrono::microseconds kExpectedWait{200};
// How often a rank that lacks rank 0's choice polls whether the others still wait for it.
constexpr std::chrono::milliseconds kMissingPollPeriod{1};
// See GraphRuns::HeldUntil. Mostly what a step asks for first does not take so long to come.
constexpr double kMostHeldS = 30;

// fork copies the engine's memory, not its thread.
std::atomic<bool> in_child{false};

const Status& ChildIsNoRank() {
  static const Status status(
      Code::kFailedPrecondition,
      "this process is a forked child of a rank, and no rank itself: it can neither start ddl nor "
      "run collectives. Do that in the process that the launcher started.");
  return status;
}

// Completes a request once, also if it is lost because there was no memory to keep it.
class Completion {
 public:
  explicit Completion(std::function<void(const Status&)> done) : done_(std::move(done)) {}
  Completion(const Completion&) = delete;
  ~Completion() {
    if (done_) done_(Status(Code::kInternal, "no memory"));
  }

  void Complete(const Status& status) { std::exchange(done_, nullptr)(status); }

 private:
  std::function<void(const Status&)> done_;
};

// "`what`: `error``advice`"; where there is no memory for that, it is so short that it needs none.
Status Failure(const char* what, const std::exception& error, const char* advice = "") {
  try {
    return Status(Code::kInternal, std::string(what) + ": " + error.what() + advice);
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
  static Engine* engine = new Engine(0, {});
  return *engine;
}

Engine::Engine(int id, std::vector<int> ranks)
    : process_set_(id), ranks_(std::move(ranks)), session_([this] { Leave(); }) {
  cancel_notice_.kind = Request::Kind::kCancelNotice;
  cancel_notice_.op_name = "Notice";
  pthread_atfork(nullptr, nullptr, [] { in_child.store(true); });
}

Status Engine::Start(Topology* topology) {
  if (in_child.load()) return ChildIsNoRank();
  std::unique_lock<std::mutex> lock(mutex_);
  if (state_ == State::kIdle) {
    state_ = State::kRunning;
    try {
      thread_ = StartThread("ddl-engine", [this] { Run(); });
      // mpirun reports a rank that ends without MPI_Finalize as a failure.
      if (process_set_ == 0) std::atexit([] { Engine::Get().Leave(); });
    } catch (const std::exception& error) {
      start_status_ = Failure("cannot start a thread", error,
                              ". Raise the limit of processes (ulimit -u, or the container's).");
      state_ = State::kFailed;
      opened_ = true;
      changed_.notify_all();
    }
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

bool Engine::UsesNccl() {
  if (in_child.load()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return opened_ && state_ == State::kRunning && uses_nccl_;
}

void Engine::Submit(Request request) {
  if (in_child.load()) {
    request.done(Status(ChildIsNoRank().code(), Title(request) + ": " + ChildIsNoRank().message()));
    return;
  }
  std::shared_ptr<Completion> completion;
  try {
    completion = std::make_shared<Completion>(std::move(request.done));
    request.done = [this, completion](const Status& status) {
      const bool whole = process_set_ == 0 || status.ok();
      completion->Complete(
          whole ? status : Status(status.code(), status.message() + " " + WhoRanksAre()));
    };
    if (request.signature == nullptr) request.signature = MakeSignature(request);
    Status why;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // Not while it opens: a kernel that does not know the ranks yet has not checked its arguments.
      if (opened_ && state_ == State::kRunning) {
        request.submitted = Clock::now();
        submitted_.push_back(std::move(request));
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
  } catch (const std::exception& error) {
    // Nobody above may see it: TensorFlow's threads and Python's end the process. What was to be
    // completed is, as it is lost.
    if (completion == nullptr) request.done(Failure("cannot submit a collective", error));
  }
}

void Engine::NotifyCancelled() {
  if (in_child.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  cancellations_ = true;
  changed_.notify_all();
}

void Engine::BeginLeave() {
  if (in_child.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kRunning) state_ = State::kLeaving;
  changed_.notify_all();
}

void Engine::Leave() {
  if (in_child.load()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::kIdle) return;
    // MPI_Finalize, called by our own thread, reports here as well.
    if (std::this_thread::get_id() == thread_.get_id()) return;
  }
  // All at once, so that ranks that still ask something of one of them get an error, and no stall.
  if (process_set_ == 0) ProcessSets::Get().BeginLeave();
  BeginLeave();
  std::lock_guard<std::mutex> lock(leave_mutex_);
  if (thread_.joinable()) thread_.join();
}

void Engine::Run() {
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
    uses_nccl_ = gpus_ != nullptr;
    if (!opened.ok()) state_ = State::kFailed;
    changed_.notify_all();
  }
  if (opened.ok()) Serve();
  if (process_set_ == 0) ProcessSets::Get().RemoveAll();  // they need MPI
  gpus_.reset();
  if (communicator_ && communicator_->HasAbandonedMessages()) (void)communicator_.release();
  communicator_.reset();
  session_.Close();
}

Status Engine::Open() {
  DDL_RETURN_IF_ERROR(ReadConfig(&config_));
  if (process_set_ == 0) DDL_RETURN_IF_ERROR(session_.Open());
  DDL_RETURN_IF_ERROR(Connect(config_, process_set_, ranks_, &communicator_));
  std::string no_gpus = "process sets do not use NCCL";
  if (process_set_ == 0) {
    DDL_RETURN_IF_ERROR(ConnectGpus(config_.gpu_transport, config_.stall_timeout_s,
                                    communicator_.get(), &gpus_, &no_gpus));
  }
  topology_ = {communicator_->rank(), communicator_->size(), communicator_->local_rank(),
               communicator_->local_size()};
  if (config_.log_info) {
    LogLine(topology_.rank, (process_set_ == 0 ? "" : WhoRanksAre() + " This is one ") + "of " +
                                std::to_string(topology_.size) + ", local rank " +
                                std::to_string(topology_.local_rank) + " of " +
                                std::to_string(topology_.local_size) + ", over " +
                                communicator_->TransportName());
    LogLine(topology_.rank, gpus_ != nullptr
                                ? "tensors of GPUs over NCCL"
                                : "tensors of GPUs through the host's memory: " + no_gpus);
  }
  if (process_set_ == 0) DDL_RETURN_IF_ERROR(recorder_.Open(config_, communicator_.get()));
  request_queue_ = std::make_unique<RequestQueue>(topology_.size == 1);
  const std::chrono::duration<double> held(std::min(kMostHeldS, config_.stall_timeout_s / 2));
  runs_ = std::make_unique<GraphRuns>(request_queue_.get(),
                                      std::chrono::duration_cast<Clock::duration>(held));
  agreement_ = std::make_unique<Agreement>(communicator_.get(), request_queue_.get(),
                                           config_.stall_timeout_s, [this] {
                                             std::lock_guard<std::mutex> lock(mutex_);
                                             return !submitted_.empty();
                                           });
  inline_request_ = std::make_unique<InlineRequest>(communicator_.get());
  allreduce_ = std::make_unique<FusedAllReduce>(communicator_.get());
  failure_text_ = "rank " + std::to_string(topology_.rank) + " could not go on";
  return Status();
}

std::string Engine::WhoRanksAre() const {
  std::string text;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(i) + " is rank " + std::to_string(ranks_[i]);
  }
  return "(Ranks here are those of process set " + std::to_string(process_set_) + ": " + text +
         " of all.)";
}

void Engine::RetryOnException(const std::function<void()>& step) {
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
      // Something of a request may be lost, so this rank cannot get back into step.
      failure = Failure(failure_text_.c_str(), error);
      usleep(1000);  // memory may come back
    }
  }
}

void Engine::Serve() {
  std::optional<Clock::time_point> first_proposed;
  RetryOnException([this, &first_proposed] {
    while (Request* next = NextRequest()) ServeRequest(next, &first_proposed);
  });
  Status left;  // an error is for ranks that stay
  RetryOnException([this, &left] {
    if (process_set_ == 0) recorder_.Flush();
    left = agreement_->Leave();
  });
  if (communicator_->HasAbandonedMessages()) (void)allreduce_.release();
  allreduce_.reset();
  agreement_.reset();
  runs_.reset();
  request_queue_.reset();
  try {
    if (process_set_ == 0) recorder_.Close(left.ok());
  } catch (const std::bad_alloc&) {
    std::fputs("ddl: no memory for the statistics\n", stderr);
  }
}

void Engine::ServeRequest(Request* next, std::optional<Clock::time_point>* first_proposed) {
  if (next == &cancel_notice_) {
    Action action;
    // An error is that of every request as well.
    (void)agreement_->Agree(cancel_notice_, nullptr, &action);
    return;
  }
  if (!*first_proposed) *first_proposed = Clock::now();
  CollectiveRecord record{*next};
  // Where rank 0 had to choose, its choice is what all were waiting for; but a rank to which it had
  // not been submitted yet was not waiting.
  record.start = std::max(**first_proposed, next->submitted);
  Action action;
  record.status = RunCollective(next, &record, &action);
  if (record.status.ok() && action.kind != Action::Kind::kRetry) {
    record.status = CheckUnambiguous(*next);
  }
  if (record.status.ok() && action.kind == Action::Kind::kRetry) {
    LogChoice(*next);
    return;
  }
  if (record.status.ok() && next->kind == Request::Kind::kJoin &&
      action.kind != Action::Kind::kAllJoined) {
    return;
  }
  if (next->kind == Request::Kind::kJoin && record.status.ok()) {
    next->joined(action.last_joined);
  }
  record.end = Clock::now();
  first_proposed->reset();
  if (next->kind != Request::Kind::kJoin && process_set_ == 0) recorder_.Add(record);
  const std::function<void(const Status&)> done = [this, &record] {
    Request request = request_queue_->Take();
    if (communicator_->HasAbandonedMessages()) abandoned_->push_back(request.memory);
    if (!record.status.ok()) {
      runs_->Fail(request.run, record.status);
    } else if (request.IsCancelled()) {
      CancelRun(request);  // too late for this one, but the others may still have more of the run
    }
    return std::move(request.done);  // first nothing holds the tensors any more
  }();
  done(record.status);
}

Status Engine::CheckUnambiguous(const Request& served) {
  if (served.ordered || served.IsCancelled() || topology_.size == 1) return Status();
  bool found = false, two_sessions = false;
  const auto look_at = [&](const std::deque<Request>& requests) {
    for (const Request& one : requests) {
      if (!AreAmbiguous(one, served) || one.IsCancelled()) continue;
      found = true;
      two_sessions = two_sessions || one.session != served.session;
    }
  };
  look_at(request_queue_->pending());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    look_at(submitted_);
  }
  if (!found) return Status();
  const std::string who = Title(served) + (two_sessions ? ": two sessions" : ": two threads") +
                          " of rank " + std::to_string(topology_.rank);
  const Status status(
      Code::kFailedPrecondition,
      two_sessions
          ? who + " ask for it at once, and the ranks cannot tell by its name which of them it is "
                  "for. Make each graph in a variable scope of its own, alike on all ranks (with "
                  "graph.as_default(), tf.compat.v1.variable_scope(\"generator\"): ...), or run "
                  "the sessions one after the other."
          : who + " run one function at once, and the ranks cannot tell whose turn it is. Make a "
                  "tf.function in the thread that runs it.");
  communicator_->Break(status);
  agreement_->Break(status);
  return status;
}

void Engine::TakeSubmitted() {
  std::deque<Request> submitted;
  bool cancellations = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    submitted.swap(submitted_);
    std::swap(cancellations, cancellations_);
  }
  for (const CancelledRun& run : agreement_->TakeCancelled()) runs_->CancelElsewhere(run);
  if (agreement_->IsBroken()) runs_->AwaitNothing();  // its error is that of what is held as well
  for (Request& request : submitted) {
    cancellations = cancellations || request.IsCancelled();
    runs_->Add(std::move(request));
  }
  if (cancellations) DropCancelled();
}

void Engine::DropCancelled() {
  runs_->DropHeld();
  const std::deque<Request>& pending = request_queue_->pending();
  while (true) {
    const auto cancelled = std::find_if(pending.begin(), pending.end(),
                                        [](const Request& one) { return one.IsCancelled(); });
    if (cancelled == pending.end()) return;
    const Request* request = &*cancelled;
    const bool alone = request->run == 0;
    CancelRun(*request);
    if (!alone) continue;
    const auto is_it = [request](const Request& one) { return &one == request; };
    for (Request& one : request_queue_->Extract(is_it)) {
      one.done(Status(Code::kCancelled, Title(one) + ": it was cancelled."));
    }
  }
}

void Engine::CancelRun(const Request& request) {
  if (runs_->HasFailed(request.run)) return;
  CancelledRun run = runs_->Identify(request);
  if (run.position >= 0 || !run.pending.empty()) {
    run.reason = "rank " + std::to_string(topology_.rank) + " has cancelled " + Title(request) +
                 ", because something else failed in that step or cancelled it. See that rank's "
                 "log for the reason.";
    agreement_->CancelRun(std::move(run));
  }
  runs_->Fail(request.run, Status(Code::kCancelled, Title(request) + ": its run was cancelled."));
}

bool Engine::Leaving() {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_ == State::kLeaving;
}

bool Engine::FailHeld(bool leaving) {
  const std::optional<Clock::time_point> held = runs_->HeldUntil();
  if (!held || (!leaving && Clock::now() < *held)) return false;
  LogLine(topology_.rank,
          "another rank has cancelled a step of which this rank has asked for nothing: what it asks "
          "for meanwhile, from the same thread, fails with it");
  runs_->FailHeld();
  return true;
}

bool Engine::HasWork() const { return !submitted_.empty() || cancellations_; }

bool Engine::AwaitSubmission(std::optional<Clock::time_point> until) {
  const auto has_work = [this] { return HasWork() || state_ == State::kLeaving; };
  std::unique_lock<std::mutex> lock(mutex_);
  if (until) {
    changed_.wait_until(lock, *until, has_work);
  } else {
    changed_.wait(lock, has_work);
  }
  return HasWork();
}

Request* Engine::NextRequest() {
  if (request_queue_->HasChoice()) {
    if (Request* chosen = ChosenRequest()) return chosen;
    request_queue_->Follow({});
  }
  while (true) {
    TakeSubmitted();
    if (request_queue_->empty()) {
      const bool leaving = Leaving();
      // A rank that leaves needs no notice.
      if (agreement_->HasCancelNotice() && !leaving) return &cancel_notice_;
      if (FailHeld(leaving)) continue;
      const std::optional<Clock::time_point> held = runs_->HeldUntil();
      if (!AwaitSubmission(held) && !held) return nullptr;
      continue;
    }
    const Clock::time_point deadline = Clock::now() + kExpectedWait;
    while (!request_queue_->empty()) {
      if (Request* next = request_queue_->Next(/*wait_for_expected=*/true)) return next;
      if (!AwaitSubmission(deadline)) return request_queue_->Next(/*wait_for_expected=*/false);
      TakeSubmitted();
    }
  }
}

Request* Engine::ChosenRequest() {
  while (true) {
    const bool leaving = Leaving();  // then nothing more will be submitted
    TakeSubmitted();
    if (Request* next = request_queue_->Next(/*wait_for_expected=*/true)) return next;
    if (agreement_->HasCancelNotice()) return &cancel_notice_;  // it may be what was chosen
    if (FailHeld(leaving)) continue;
    if (leaving) {
      (void)agreement_->Leave();
      return nullptr;
    }
    if (!agreement_->PollWhileMissing().ok()) return nullptr;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kMissingPollPeriod, [this] { return HasWork(); });
  }
}

void Engine::LogChoice(const Request& next) const {
  if (!config_.log_info || !request_queue_->HasChoice()) return;
  const std::string ours = Title(next);
  if (ours == request_queue_->choice().title) return;
  LogLine(topology_.rank, "order: " + request_queue_->choice().title + " of rank 0 before " + ours);
}

Status Engine::RunCollective(Request* request, CollectiveRecord* record, Action* action) {
  try {
    return AgreeAndRun(request, record, action);
  } catch (const std::exception& error) {
    // The other ranks are in the middle of it, or will be.
    const Status status(Code::kInternal,
                        Title(*request) + ": " + failure_text_ + ": " + error.what());
    communicator_->Break(status);
    agreement_->Break(status);
    return status;
  }
}

Status Engine::AgreeAndRun(Request* request, CollectiveRecord* record, Action* action) {
  InlineTensor small;
  const bool packed = inline_request_->Pack(*request, &small);
  const Status agreed = agreement_->Agree(*request, packed ? &small : nullptr, action);
  record->agreed = Clock::now();
  record->nbytes = Nbytes(*request);
  if (!agreed.ok()) return agreed;
  const std::vector<int64_t>* numbers = nullptr;
  const bool joined = request->kind == Request::Kind::kJoin;
  if (action->kind == Action::Kind::kReduced || action->kind == Action::Kind::kRun) {
    runs_->Ran(joined ? 0 : request->run);
  }
  if (action->kind == Action::Kind::kReduced) {
    record->inlined = inline_request_->Unpack(*request);
    if (record->inlined) return agreed;
    numbers = &inline_request_->numbers();
  } else if (action->kind != Action::Kind::kRun) {
    return agreed;
  }
  if (joined) return Contribute(*action);
  request->contributors = action->contributors;
  return Execute(*request, numbers, &record->nbytes);
}

Status Engine::Contribute(const Action& action) {
  Request theirs;
  if (const Status parsed = Parse(action.description, &theirs); !parsed.ok()) {
    communicator_->Break(parsed);
    return parsed;
  }
  theirs.contributors = action.contributors;
  const int64_t element = static_cast<int64_t>(DTypeSize(theirs.dtype));
  if (theirs.kind == Request::Kind::kAllGather) {
    for (TensorBuffer& tensor : theirs.tensors) {  // no rows of its own
      if (!tensor.dims.empty()) tensor.dims[0] = 0;
      tensor.count = 0;
    }
    theirs.allocate = [this, &theirs, element](const std::vector<int64_t>& sizes, void** outs) {
      int64_t largest = 0;  // all results may lie at the same place: nobody reads them
      for (size_t tensor = 0; tensor < theirs.tensors.size(); ++tensor) {
        int64_t nbytes = element;
        const std::vector<int64_t>& dims = theirs.tensors[tensor].dims;
        for (size_t i = 1; i < dims.size(); ++i) nbytes *= dims[i];
        const auto first = sizes.begin() + static_cast<int64_t>(tensor) * topology_.size;
        largest = std::max(largest,
                           std::accumulate(first, first + topology_.size, int64_t{0}) * nbytes);
      }
      neutral_.resize(largest);
      std::fill_n(outs, theirs.tensors.size(), neutral_.data());
      return Status();
    };
  } else {
    const int64_t nbytes = Nbytes(theirs);
    // What is scattered is read while a share of it is written.
    const int64_t apart = theirs.kind == Request::Kind::kReduceScatter ? nbytes : 0;
    neutral_.resize(nbytes + apart);
    FillNeutral(neutral_.data(), nbytes / element, theirs.dtype, theirs.op);
    char* at = neutral_.data();
    for (TensorBuffer& tensor : theirs.tensors) {
      tensor.in = at;
      tensor.out = at + apart;
      at += tensor.count * element;
    }
  }
  int64_t nbytes = Nbytes(theirs);
  // An error is for those who asked. This rank goes on until all have joined; an error that
  // breaks the group reaches it in the next round.
  (void)Execute(theirs, nullptr, &nbytes);
  return Status();
}

Status Engine::ExecuteOnGpus(const Request& request, int64_t* nbytes) {
  const TensorBuffer& first = request.tensors[0];
  if (gpus_ == nullptr) {
    return Status(Code::kFailedPrecondition,
                  "NCCL cannot be used on all ranks (DDL_LOG=info says why). Set DDL_GPU=host, or "
                  "put the op on /CPU:0.");
  }
  switch (request.kind) {
    case Request::Kind::kBroadcast:
      return gpus_->Broadcast(*request.gpu, first.in, first.out, *nbytes, request.root);
    case Request::Kind::kAllGather:
      return Gather(communicator_.get(), gpus_.get(), request, nullptr, nbytes);
    default: break;
  }
  if (request.adasum) {
    return Status(Code::kFailedPrecondition, "NCCL has no Adasum. Put the op on /CPU:0.");
  }
  std::vector<NcclCommunicator::Tensor> tensors;
  for (const TensorBuffer& one : request.tensors) tensors.push_back({one.in, one.out, one.count});
  return gpus_->AllReduce(*request.gpu, tensors, request.dtype, request.average,
                          request.op);
}

Status Engine::Execute(const Request& request, const std::vector<int64_t>* numbers,
                       int64_t* nbytes) {
  if (request.gpu != nullptr) {
    const Status moved = ExecuteOnGpus(request, nbytes);
    if (moved.ok() || moved.message().rfind(Title(request), 0) == 0) return moved;
    return Status(moved.code(), Title(request) + " on the GPU of rank " +
                                    std::to_string(topology_.rank) + ": " + moved.message());
  }
  switch (request.kind) {
    case Request::Kind::kBroadcast: {
      const int64_t element = static_cast<int64_t>(DTypeSize(request.dtype));
      for (const TensorBuffer& tensor : request.tensors) {
        DDL_RETURN_IF_ERROR(
            communicator_->Broadcast(tensor.out, tensor.count * element, request.root));
      }
      return Status();
    }
    case Request::Kind::kReduceScatter:
      return ReduceScatter(communicator_.get(), request, ReductionOf(request, topology_.size));
    case Request::Kind::kAllToAll: return AllToAll(communicator_.get(), request, numbers, nbytes);
    case Request::Kind::kAllGather:
      return Gather(communicator_.get(), gpus_.get(), request, numbers, nbytes);
    default: break;
  }
  return allreduce_->Run(request);
}

}  // namespace ddl
