#ifndef DDL_RUNTIME_ENGINE_H_
#define DDL_RUNTIME_ENGINE_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

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
// the ranks have agreed whose turn it is. Its thread alone calls MPI.
//
// A process has one engine. It is never destroyed: MPI holds a pointer to it, and threads of
// TensorFlow may still be running when the process exits.
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

  // Takes a request and returns. Its `done` gets FailedPrecondition before Start or after Leave.
  void Submit(Request request);

  // Runs what was submitted, waits until all other ranks leave too, ends MPI if we started it and
  // stops the thread. Further calls do nothing.
  void Leave();

 private:
  enum class State { kIdle, kRunning, kLeaving, kFailed };

  Engine();
  void Run();
  Status Open();
  // Runs requests until this rank leaves.
  void Serve();
  // Waits for the request whose turn it is. Null: there are none any more.
  const Request* NextTurn();
  // The same where rank 0 has chosen which. Null: the others have given up waiting for it.
  const Request* ChosenTurn();
  // Hands over what was submitted to the negotiator. Call with mutex_ held.
  void TakeSubmitted();
  void LogChoice(const Request& shown) const;
  // Agrees with the other ranks on the request and runs it; fills in all but turn, status and end.
  // `accord` may be that it was not its turn.
  Status RunTogether(Passage* passage, Accord* accord);
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
  Recorder recorder_;
};

}  // namespace ddl

#endif  // DDL_RUNTIME_ENGINE_H_
