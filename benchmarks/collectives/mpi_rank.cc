// Collectives of float32 by one MPI library, for mpi_rank.py; with DDL_OURS by our engine as well,
// through shared memory. Every rank checks every element before and after a sample, and ends the
// job if one is wrong.

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "require.h"
#include "values.h"
#ifdef DDL_OURS
#include <memory>

#include "comm/mpi_connect.h"
#include "ours.h"
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRoot = 0;

int rank = 0, size = 0;
#ifdef DDL_OURS
std::unique_ptr<ddl::Communicator> shared;
#endif

// What a collective takes and gives, in elements; `block` is what goes to or comes from one rank.
struct Collective {
  Collective(const std::string& op, int64_t nbytes) : op(op) {
    const int64_t count = nbytes / 4;
    const bool cut = op == "reducescatter" || op == "alltoall";
    block = cut ? std::max<int64_t>(1, count / size) : count;
    in_count = cut ? block * size : count;
    out_count = op == "allgather" ? block * size : op == "reducescatter" ? block : in_count;
  }

  // A broadcast has one buffer, which is its output.
  void Fill(float* in, float* out) const {
    for (int64_t i = 0; i < in_count; ++i) in[i] = ValueOf(i, rank, size);
    const bool root = op == "broadcast" && rank == kRoot;
    for (int64_t i = 0; i < out_count; ++i) out[i] = root ? ValueOf(i, kRoot, size) : -1.0f;
  }

  float Want(int64_t i) const {
    if (op == "broadcast") return ValueOf(i, kRoot, size);
    if (op == "allgather") return ValueOf(i % block, static_cast<int>(i / block), size);
    if (op == "alltoall") return ValueOf(rank * block + i % block, static_cast<int>(i / block), size);
    return SumOf(op == "reducescatter" ? rank * block + i : i, size);
  }

  void Check(const float* out, const char* when) const {
    for (int64_t i = 0; i < out_count; ++i) {
      if (out[i] != Want(i)) DieOfWrong(op + ", " + when, i, out[i], Want(i));
    }
  }

  void Mpi(const float* in, float* out) const {
    const int n = static_cast<int>(block);
    const MPI_Comm all = MPI_COMM_WORLD;
    if (op == "allreduce") MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, all);
    if (op == "allgather") MPI_Allgather(in, n, MPI_FLOAT, out, n, MPI_FLOAT, all);
    if (op == "reducescatter") MPI_Reduce_scatter_block(in, out, n, MPI_FLOAT, MPI_SUM, all);
    if (op == "alltoall") MPI_Alltoall(in, n, MPI_FLOAT, out, n, MPI_FLOAT, all);
    if (op == "broadcast") MPI_Bcast(out, n, MPI_FLOAT, kRoot, all);
  }

  std::string op;
  int64_t block, in_count, out_count;
};

#ifdef DDL_OURS
// As a kernel hands it to the engine.
ddl::Request MakeRequest(const Collective& collective, const float* in, float* out) {
  using Kind = ddl::Request::Kind;
  ddl::Request request;
  const std::string& op = collective.op;
  request.kind = op == "allreduce"       ? Kind::kAllReduce
                 : op == "allgather"     ? Kind::kAllGather
                 : op == "reducescatter" ? Kind::kReduceScatter
                 : op == "alltoall"      ? Kind::kAllToAll
                                         : Kind::kBroadcast;
  request.name = op;
  request.root = kRoot;
  request.tensors.push_back({in, out, collective.in_count, {collective.in_count}});
  // The memory is there already, as for the others.
  request.allocate = [out](const std::vector<int64_t>&, void** outs) {
    outs[0] = out;
    return ddl::Status();
  };
  return request;
}
#endif

}  // namespace

extern "C" {

// Collective. Writes what the library says of itself, at most `room` bytes. Returns the rank.
int BenchStart(char* version, int room) {
  int provided = 0, length = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::vector<char> text(MPI_MAX_LIBRARY_VERSION_STRING);
  MPI_Get_library_version(text.data(), &length);
  std::strncpy(version, text.data(), room - 1);
#ifdef DDL_OURS
  ddl::Config config;
  config.transport = ddl::TransportChoice::kShm;
  Require(ddl::Connect(config, 0, {}, &shared));
#endif
  return rank;
}

// Collective. Seconds of one of `calls` calls of `op`, each with the next of `buffers` pairs of
// input and output, which all have been used before. `nbytes`: of the input of a rank, which has an
// element for each rank where it is cut.
double BenchMeasure(const char* op, int ours, int64_t nbytes, int calls, int buffers) {
  const Collective collective(op, nbytes);
  std::vector<Buffer> inputs, outputs;
#ifdef DDL_OURS
  std::vector<ddl::Request> requests;
  requests.reserve(buffers);
#else
  if (ours) Die("this library was built without our engine");
#endif
  const auto run = [&](int i) {
#ifdef DDL_OURS
    if (ours) return Ours(*shared, requests[i]);
#endif
    collective.Mpi(inputs[i].get(), outputs[i].get());
  };
  for (int i = 0; i < buffers; ++i) {
    inputs.emplace_back(collective.in_count);
    outputs.emplace_back(collective.out_count);
    collective.Fill(inputs[i].get(), outputs[i].get());
#ifdef DDL_OURS
    requests.push_back(MakeRequest(collective, inputs[i].get(), outputs[i].get()));
#endif
    run(i);
    collective.Check(outputs[i].get(), "before the sample");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  const Clock::time_point start = Clock::now();
  for (int call = 0, i = 0; call < calls; ++call) {
    run(i);
    if (++i == buffers) i = 0;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count() / calls;
  for (Buffer& output : outputs) collective.Check(output.get(), "after the sample");
  return seconds;
}

// Collective.
void BenchEnd() {
#ifdef DDL_OURS
  shared.reset();
#endif
  MPI_Finalize();
}

}  // extern "C"
