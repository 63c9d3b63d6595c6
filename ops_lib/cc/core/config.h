#ifndef DDL_CORE_CONFIG_H_
#define DDL_CORE_CONFIG_H_

#include <string>

#include "core/status.h"

namespace ddl {

enum class TransportChoice { kAuto, kShm, kMpi };
enum class GpuTransport { kAuto, kNccl, kHost };

// Every DDL_* variable that the library reads is read here, once, when the engine starts.
struct Config {
  // DDL_STALL_TIMEOUT: seconds that ranks wait for a missing one in a collective before all of
  // them fail. Long by default because rank 0 may be evaluating or writing a checkpoint alone.
  double stall_timeout_s = 300.0;
  // DDL_TRANSPORT: how the ranks reach each other. "shm" fails where they cannot share memory;
  // "auto" takes MPI then.
  TransportChoice transport = TransportChoice::kAuto;
  // DDL_THREADS: how many threads of a rank reduce at once. 0: as the cores of the host allow.
  int threads = 0;
  // DDL_HOSTID: ranks with the same text are on one host, whatever MPI says. Empty: MPI says.
  std::string host_id;
  // DDL_GPU: how tensors in the memory of GPUs travel. "nccl" fails where NCCL cannot be used,
  // "host" leaves that memory alone: TensorFlow copies; "auto" takes NCCL where all ranks can.
  GpuTransport gpu_transport = GpuTransport::kAuto;
  // DDL_PROGRESS: file to which rank 0 appends progress lines (JSON). Empty: none.
  std::string progress_path;
  // DDL_TIMELINE: file for a Chrome trace; "{rank}" in it stands for the rank. Empty: none.
  std::string timeline_path;
  // DDL_STATS: file in which rank 0 leaves the run's statistics (JSON). Empty: none.
  std::string stats_path;
  // DDL_RECORD_DIR: folder in which each rank leaves what it has communicated so far. Empty: none.
  std::string record_dir;
  // DDL_LOG: "warning" (default) or "info", which also says where the ranks run and, at the end,
  // the statistics.
  bool log_info = false;
};

// Fills `config` from the environment. InvalidArgument names a variable whose value has no meaning.
Status ReadConfig(Config* config);

}  // namespace ddl

#endif  // DDL_CORE_CONFIG_H_
