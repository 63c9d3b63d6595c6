#ifndef DDL_RUNTIME_GATHER_H_
#define DDL_RUNTIME_GATHER_H_

#include <cstdint>

#include "comm/communicator.h"
#include "comm/nccl_communicator.h"
#include "core/status.h"
#include "runtime/request.h"

namespace ddl {

// Joins the tensors of all ranks along the first dimension, in the order of the ranks.
//
// Three steps: the ranks exchange their first dimensions; each allocates the result, and they tell
// each other whether they could, so that none waits for one that failed; then the tensors travel.
// The ranks have agreed on all but the first dimensions before. On every rank:
//   InvalidArgument  the tensor is a scalar
//   Internal         a rank could not allocate the result
//
// `nbytes` gets the size of the result. `gpus` brings what lies on GPUs.
Status Gather(Communicator* communicator, NcclCommunicator* gpus, const Request& request,
              int64_t* nbytes);

}  // namespace ddl

#endif  // DDL_RUNTIME_GATHER_H_
