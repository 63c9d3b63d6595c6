#ifndef DDL_RUNTIME_ENGINE_H_
#define DDL_RUNTIME_ENGINE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/mpi_session.h"
#include "comm/nccl_communicator.h"
#include "core/config.h"
#include "runtime/agreement.h"
#include "runtime/fused_allreduce.h"
#include "runtime/inline_request.h"
#include "runtime/request_queue.h"
#include "runtime/recorder.h"
#include "runtime/request.h"
#include "runtime/graph_runs.h"

namespace ddl {

// Where this process stands among the ranks.
struct Topology {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
};

// Runs collectives one after the other: ordered ones in the order of submission, the others when
// the ranks have agreed which is next. MPI is called by its thread, or by one that it waits for.
//
// A process has one engine for all ranks, and one for each process set that it is of (see
// runtime/process_sets.h). None is ever destroyed: MPI holds a pointer to it, and threads of
// TensorFlow may still be running when the process exits. A child that a rank forks is no rank: its
// engine rejects everything, and ends nothing.
class Engine {
 public:
  // That of all ranks.
  static Engine& Get();

  // Of process set `id`, which is these ranks. Only for ProcessSets.
  Engine(int id, std::vector<int> ranks);

  // Starts the thread and MPI, and waits until both are up. Ok at once if already started;
  // FailedPrecondition after Leave; else what went wrong in the first start.
  Status Start(Topology* topology);

  // Whether the engine runs; fills `topology` if so.
  bool Started(Topology* topology);

  // Whether tensors in the memory of GPUs travel by NCCL: as on every other rank.
  bool UsesNccl();

  // Takes a request and returns. Its `done` gets FailedPrecondition before Start has connected the
  // ranks or after Leave, and in a forked child; why the start failed, if it did.
  void Submit(Request request);

  // Some request has been cancelled: its flag is set, and nobody waits for its `done`. If it has
  // not begun on all ranks it mostly never will, and the other ranks learn that its run was
  // cancelled here. Any thread may call it.
  void NotifyCancelled();

  // Runs what was submitted, waits until all other ranks leave too, ends MPI if we started it and
  // stops the thread. Further calls do nothing.
  void Leave();
  // The first part of it: other ranks learn that this one has nothing more to ask for.
  void BeginLeave();

 private:
  enum class State { kIdle, kRunning, kLeaving, kFailed };

  void Run();
  Status Open();
  // What the numbers of ranks mean in the messages of a process set.
  std::string WhoRanksAre() const;
  // Runs requests until this rank leaves.
  void Serve();
  // Proposes and runs one that NextRequest has given. `first_proposed`: when the first one was,
  // since the last collective.
  void ServeRequest(Request* next,
                    std::optional<std::chrono::steady_clock::time_point>* first_proposed);
  // Runs `step` until it does not throw. After a throw the group is broken: a step finds an error
  // wherever it would need the other ranks.
  void RetryOnException(const std::function<void()>& step);
  // Waits for the request to propose next, which may be a cancel notice. Null: there will be none.
  Request* NextRequest();
  // The same where rank 0 has chosen which. Null: the others no longer wait for it.
  Request* ChosenRequest();
  // An error, which breaks the group, if another session, or another run of a graph, waits for what
  // has the name of `served`: another rank may have served the other one's in its place.
  Status CheckUnambiguous(const Request& served);
  // Fails what other ranks have cancelled, moves what was submitted to the request queue, and drops
  // what was cancelled here.
  void TakeSubmitted();
  void DropCancelled();
  // Fails the run of a request that was cancelled here, and lets the others know.
  void CancelRun(const Request& request);
  // Waits for something to take, until then at most. False: there is nothing.
  bool AwaitSubmission(std::optional<std::chrono::steady_clock::time_point> until);
  // Fails what was held for long enough, or all if this rank leaves. False: there is none.
  bool FailHeld(bool leaving);
  bool HasWork() const;  // call with mutex_ held
  bool Leaving();
  void LogChoice(const Request& next) const;
  // Agrees with the other ranks on the request and runs it; fills in all but start, status and end.
  // `action` may be kRetry: it was not run. An exception breaks the group.
  Status RunCollective(Request* request, CollectiveRecord* record, Action* action);
  Status AgreeAndRun(Request* request, CollectiveRecord* record, Action* action);
  // This rank has joined: adds to what the others reduce what changes nothing.
  Status Contribute(const Action& action);
  // Runs the collective, the same on all ranks. `nbytes`: of this rank's tensors, then of the
  // result.
  // `numbers`: of all ranks, see runtime/gather.h, or null.
  Status Execute(const Request& request, const std::vector<int64_t>* numbers, int64_t* nbytes);
  Status ExecuteOnGpus(const Request& request, int64_t* nbytes);

  const int process_set_;
  const std::vector<int> ranks_;  // of a process set; of all ranks: empty

  std::mutex mutex_;  // guards all up to thread_
  std::condition_variable changed_;
  State state_ = State::kIdle;
  bool opened_ = false;
  Status start_status_;
  Topology topology_;
  bool uses_nccl_ = false;
  std::deque<Request> submitted_;
  bool cancellations_ = false;  // some were cancelled since they were last dropped
  std::thread thread_;
  std::mutex leave_mutex_;  // one caller of Leave joins the thread, the others wait for it

  // Used by the thread alone.
  Config config_;
  MpiSession session_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<NcclCommunicator> gpus_;
  std::unique_ptr<RequestQueue> request_queue_;
  std::unique_ptr<GraphRuns> runs_;
  std::unique_ptr<Agreement> agreement_;
  std::unique_ptr<InlineRequest> inline_request_;
  std::unique_ptr<FusedAllReduce> allreduce_;
  Request cancel_notice_;
  std::string failure_text_;  // made while there is memory
  // What abandoned messages still point to; never freed.
  std::vector<std::shared_ptr<void>>* abandoned_ = new std::vector<std::shared_ptr<void>>;
  std::vector<char> neutral_;  // what a joined rank contributes, and gets
  Recorder recorder_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_ENGINE_H_
