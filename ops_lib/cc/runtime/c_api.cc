// What Python calls through ctypes, besides the ops.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi_session.h"
#include "runtime/description.h"
#include "runtime/engine.h"
#include "runtime/process_sets.h"
#include "runtime/teams.h"

// The loader looks for these texts in the file, before it loads it: a library that was built for
// another TensorFlow cannot be loaded to be asked. The interface is that of the functions below, as
// loader.py calls them: whoever changes one of them counts on, here and there.
extern "C" __attribute__((visibility("default"), used)) const char ddl_built_for[] =
    "DDL_BUILT_FOR_TENSORFLOW=" DDL_TF_VERSION ";DDL_INTERFACE=1;";

namespace {

// Puts the message into the caller's memory, and returns the code.
int ReturnStatus(const ddl::Status& status, char* message, int message_size) {
  std::snprintf(message, message_size, "%s", status.message().c_str());
  return static_cast<int>(status.code());
}

ddl::Request NewRequest(const char* op_name, const char* name, const char* stream, int dtype) {
  ddl::Request request;
  request.op_name = op_name;
  request.name = ddl::OneLine(name);
  request.stream = ddl::OneLine(stream);
  request.dtype = static_cast<ddl::DType>(dtype);
  return request;
}

// An array of that shape, reduced or overwritten in place.
ddl::TensorBuffer InPlace(void* values, const int64_t* dims, int ndims) {
  const std::vector<int64_t> shape(dims, dims + ndims);
  const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t{1},
                                        std::multiplies<int64_t>());
  return {values, values, count, shape};
}

// What `body` returns, with its message in the caller's memory. An exception, as for want of memory,
// would end Python.
template <typename Body>
int Returned(char* message, int message_size, const Body& body) {
  try {
    return ReturnStatus(body(), message, message_size);
  } catch (const std::exception& error) {
    std::snprintf(message, message_size, "ddl: %s", error.what());
    return static_cast<int>(ddl::Code::kInternal);
  }
}

// Hands the request to the engine and waits for its end.
ddl::Status Run(ddl::Request request) {
  std::promise<ddl::Status> ended;
  request.done = [&ended](const ddl::Status& status) { ended.set_value(status); };
  ddl::Engine::Get().Submit(std::move(request));
  return ended.get_future().get();
}

}  // namespace

extern "C" {

// Starts the engine. Fills topology with rank, size, local_rank, local_size. Returns 0, or 1 with
// a message of at most message_size bytes.
__attribute__((visibility("default"))) int ddl_init(int topology[4], char* message,
                                                    int message_size) {
  ddl::Topology found;
  const ddl::Status status = ddl::Engine::Get().Start(&found);
  topology[0] = found.rank;
  topology[1] = found.size;
  topology[2] = found.local_rank;
  topology[3] = found.local_size;
  std::snprintf(message, message_size, "%s", status.message().c_str());
  return status.ok() ? 0 : 1;
}

// Whether collectives may be put on GPUs: 1 or 0. Known after ddl_init.
__attribute__((visibility("default"))) int ddl_device_collectives() {
  return ddl::Engine::Get().UsesNccl() ? 1 : 0;
}

// Whether messages may still point to what a collective that ended with an error was given, which
// must then never be freed: 1 or 0.
__attribute__((visibility("default"))) int ddl_has_abandoned_messages() {
  return ddl::MpiSession::HasAbandonedMessages() ? 1 : 0;
}

// Sums (or averages) an array over the ranks in place, and waits for that. `stream`: see Request.
// `dtype` is a DType. Returns a Code, with a message if it is not 0.
__attribute__((visibility("default"))) int ddl_all_reduce(const char* name, const char* stream,
                                                          int dtype, int average, int optional,
                                                          void* values, const int64_t* dims,
                                                          int ndims, char* message,
                                                          int message_size) {
  return Returned(message, message_size, [&] {
    ddl::Request request = NewRequest("AllReduce", name, stream, dtype);
    request.average = average != 0;
    // One rank alone may ask for what is optional, so it has no position among the ordered ones.
    request.ordered = optional == 0;
    request.optional = optional != 0;
    request.tensors.push_back(InPlace(values, dims, ndims));
    return Run(std::move(request));
  });
}

// Overwrites an array with that of rank `root`. Arguments and result as of ddl_all_reduce.
__attribute__((visibility("default"))) int ddl_broadcast(const char* name, const char* stream,
                                                         int dtype, int root, void* values,
                                                         const int64_t* dims, int ndims,
                                                         char* message, int message_size) {
  return Returned(message, message_size, [&] {
    ddl::Request request = NewRequest("Bcast", name, stream, dtype);
    request.kind = ddl::Request::Kind::kBroadcast;
    request.root = root;
    request.tensors.push_back(InPlace(values, dims, ndims));
    return Run(std::move(request));
  });
}

// Waits until all ranks are at the barrier of that name. `hint`: what to do where another rank is
// at something else. Returns as ddl_all_reduce.
__attribute__((visibility("default"))) int ddl_barrier(const char* name, const char* stream,
                                                       const char* hint, char* message,
                                                       int message_size) {
  return Returned(message, message_size, [&] {
    const auto nothing = std::make_shared<int32_t>(0);
    ddl::Request request =
        NewRequest("Barrier", name, stream, static_cast<int>(ddl::DType::kInt32));
    request.hint = ddl::OneLine(hint);
    request.tensors.push_back({nothing.get(), nothing.get(), 1, {1}});
    request.memory = nothing;
    return Run(std::move(request));
  });
}

// Contributes zeros to what the other ranks reduce, until all have called it. `last` gets the last
// one that did. Returns as ddl_all_reduce.
__attribute__((visibility("default"))) int ddl_join(const char* stream, int* last, char* message,
                                                    int message_size) {
  return Returned(message, message_size, [&] {
    ddl::Request request =
        NewRequest("Join", "join", stream, static_cast<int>(ddl::DType::kInt32));
    request.kind = ddl::Request::Kind::kJoin;
    request.joined = [last](int rank) { *last = rank; };
    return Run(std::move(request));
  });
}

// Starts process set `id` of `count` ranks; see ProcessSets::Add. Returns as ddl_all_reduce.
__attribute__((visibility("default"))) int ddl_add_process_set(int id, const int* ranks, int count,
                                                               char* message, int message_size) {
  return Returned(message, message_size,
                  [&] { return ddl::ProcessSets::Get().Add(id, {ranks, ranks + count}); });
}

// Ends process set `id`; see ProcessSets::Remove. Returns as ddl_all_reduce.
__attribute__((visibility("default"))) int ddl_remove_process_set(int id, char* message,
                                                                  int message_size) {
  return Returned(message, message_size, [&] { return ddl::ProcessSets::Get().Remove(id); });
}

// See Teams::Prepare.
__attribute__((visibility("default"))) void ddl_prepare_teams(int count, int64_t max_elements) {
  ddl::ProcessTeams().Prepare(count, max_elements);
}

// See Teams::Configure. Returns as ddl_all_reduce.
__attribute__((visibility("default"))) int ddl_configure_team(int team, int smooth, int64_t ksteps,
                                                              int64_t max_steps,
                                                              int64_t report_every, char* message,
                                                              int message_size) {
  const ddl::TeamPlan plan{smooth != 0, ksteps, max_steps, report_every};
  return Returned(message, message_size,
                  [&] { return ddl::ProcessTeams().Configure(team, plan); });
}

// One step of a team, see Teams::Step: reads `tensors` arrays `in`, and writes what the step
// applies to `out`. Array i has ndims[i] dimensions; `dims` holds those of all, one after the
// other. Waits as long as the step has to. Returns as ddl_all_reduce.
__attribute__((visibility("default"))) int ddl_team_gradients(int team, const char* name,
                                                              const char* stream, int dtype,
                                                              int tensors, const void** in,
                                                              void** out, const int64_t* dims,
                                                              const int* ndims, char* message,
                                                              int message_size) {
  return Returned(message, message_size, [&] {
    ddl::Request request = NewRequest("TeamGradients", name, stream, dtype);
    // Reduced in place: the caller may change `in` as soon as this returns.
    const auto copies = std::make_shared<std::vector<std::vector<char>>>();
    std::vector<int64_t> counts;
    for (int i = 0; i < tensors; ++i) {
      ddl::TensorBuffer tensor = InPlace(nullptr, dims, ndims[i]);
      const char* from = static_cast<const char*>(in[i]);
      copies->emplace_back(from, from + tensor.count * ddl::DTypeSize(request.dtype));
      tensor.in = tensor.out = copies->back().data();
      counts.push_back(tensor.count);
      request.tensors.push_back(std::move(tensor));
      dims += ndims[i];
    }
    const ddl::DType type = request.dtype;
    std::promise<ddl::Status> ended;
    ddl::ProcessTeams().Step(team, std::move(request), nullptr, copies,
                             [&](const ddl::StepGradients& gradients) {
                               for (int i = 0; i < tensors && gradients.status.ok(); ++i) {
                                 gradients.Write(i, counts[i], type, out[i]);
                               }
                               ended.set_value(gradients.status);
                             });
    return ended.get_future().get();
  });
}

// The DType of that name, as NumPy has it; -1: there is none.
__attribute__((visibility("default"))) int ddl_dtype(const char* name) {
  ddl::DType dtype;
  return ddl::FindDType(name, &dtype) ? static_cast<int>(dtype) : -1;
}

// Leaves the group; see Engine::Leave.
__attribute__((visibility("default"))) void ddl_shutdown() { ddl::Engine::Get().Leave(); }

// Ends all ranks with this exit code. Does not return.
__attribute__((visibility("default"))) void ddl_abort(int exit_code) {
  ddl::MpiSession::Abort(exit_code);
}

}  // extern "C"
