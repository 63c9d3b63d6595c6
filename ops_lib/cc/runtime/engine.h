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
#include "runtime/negotiator.h"
#include "runtime/recorder.h"
#include "runtime/request.h"

namespace ddl {

// Where this process stands among the ranks.
struct Topology {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
};

// Runs collectives one after the other: ordered ones in the order of submission, the others when
// the ranks have agreed whose turn it is. MPI is called by its thread, or by one that it waits for.
//
// A process has one engine. It is never destroyed: MPI holds a pointer to it, and threads of
// TensorFlow may still be running when the process exits. A child that a rank forks is no rank: its
// engine refuses everything, and ends nothing.
class Engine {
 public:
  static Engine& Get();

  // Starts the thread and MPI, and waits until both are up. Ok at once if already started;
  // FailedPrecondition after Leave; else what went wrong in the first start.
  Status Start(Topology* topology);

  // Whether the engine runs; fills `topology` if so.
  bool Started(Topology* topology);

  // Whether tensors in the memory of GPUs travel by NCCL: as on every other rank.
  bool ReachesGpus();

  // Takes a request and returns. Its `done` gets FailedPrecondition before Start or after Leave, and
  // in a forked child; why the start failed, if it did.
  void Submit(Request request);

  // Some request has been withdrawn: its flag is set, and nobody waits for its `done`. If it has not
  // begun on all ranks it mostly never will, and the other ranks learn that its run was given up
  // here. Any thread may call it.
  void Withdraw();

  // Runs what was submitted, waits until all other ranks leave too, ends MPI if we started it and
  // stops the thread. Further calls do nothing.
  void Leave();

 private:
  enum class State { kIdle, kRunning, kLeaving, kFailed };

  Engine();
  void Run();
  Status Open();
  // Fails what was submitted while the engine did not start.
  void Refuse(const Status& status);
  // Runs requests until this rank leaves.
  void Serve();
  // One that NextTurn has given. `first_shown`: when the first was, since the last collective.
  void ServeTurn(Request* shown,
                 std::optional<std::chrono::steady_clock::time_point>* first_shown);
  // Runs `step` until it does not throw. After a throw the group is broken: a step finds an error
  // wherever it would need the other ranks.
  void Persist(const std::function<void()>& step);
  // Waits for the request whose turn it is, or that tells the others what they must know. Null:
  // there are none any more.
  Request* NextTurn();
  // The same where rank 0 has chosen which. Null: the others have given up waiting for it.
  Request* ChosenTurn();
  // Hands over what was submitted to the negotiator, and drops what was withdrawn.
  void TakeSubmitted();
  void DropWithdrawn();
  // The run of a request that was withdrawn is given up here, and the others must know.
  void GiveUp(const Request& request);
  // Waits for something to take, until then at most. False: in vain.
  bool AwaitSubmission(std::optional<std::chrono::steady_clock::time_point> until);
  bool HasNews() const;  // call with mutex_ held
  bool Leaving();
  // Requests of this run fail with `status`, those that wait and those that will be submitted.
  void FailRun(int64_t run, const Status& status);
  bool HasFailed(int64_t run) const;
  void LogChoice(const Request& shown) const;
  // Agrees with the other ranks on the request and runs it; fills in all but turn, status and end.
  // `accord` may be that it was not its turn. What throws ends the group.
  Status RunTogether(Request* request, Passage* passage, Accord* accord);
  Status RunAgreed(Request* request, Passage* passage, Accord* accord);
  // This rank has joined: adds zeros to what the others reduce.
  Status Contribute(const Accord& accord);
  // Moves the bytes. All ranks run the same. `nbytes`: of this rank's tensors, then of the result.
  Status Move(const Request& request, int64_t* nbytes);
  Status MoveOnGpus(const Request& request, int64_t* nbytes);

  std::mutex mutex_;  // guards all up to thread_
  std::condition_variable changed_;
  State state_ = State::kIdle;
  bool opened_ = false;
  Status start_status_;
  Topology topology_;
  bool reaches_gpus_ = false;
  std::deque<Request> queue_;
  bool withdrawals_ = false;  // some were withdrawn since the last look
  std::thread thread_;
  std::mutex leave_mutex_;  // one caller of Leave joins the thread, the others wait for it

  // Used by the thread alone.
  Config config_;
  MpiSession session_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<NcclCommunicator> gpus_;
  std::unique_ptr<Negotiator> negotiator_;
  std::unique_ptr<Agreement> agreement_;
  std::unique_ptr<FusedAllReduce> allreduce_;
  struct FailedRun {
    int64_t run;
    Status status;
  };
  std::deque<FailedRun> failed_runs_;  // the newest
  Request notice_;
  std::string could_not_go_on_;  // made while there is memory
  // What messages still point to that were given up; never freed.
  std::vector<std::shared_ptr<void>>* abandoned_ = new std::vector<std::shared_ptr<void>>;
  std::vector<char> zeros_;  // what a joined rank contributes, and gets
  Recorder recorder_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_ENGINE_H_
