// The engine without TensorFlow: starts in milliseconds, so that endings whose messages cross on
// the way can be tried many times. argv: how the job ends, and which ranks stand still meanwhile,
// if any do, or "soak" or "large" and options (soak.h). Prints "<rank> code sum" for each
// collective.

#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/engine.h"
#include "runtime/process_sets.h"
#include "soak.h"

namespace {

// Of a rank that is to stand still as soon as it has begun to send a long message: where to say so.
int still_in_message = -1;

// Starts the sum of `tensors` vectors of ones, or the broadcast or gather of one, and returns. The
// ones become what the collective yields.
std::future<ddl::Status> Begin(ddl::Request::Kind kind, const char* op_name, const char* name,
                               std::vector<std::vector<float>>* tensors) {
  ddl::Request request;
  request.kind = kind;
  request.op_name = op_name;
  request.name = name;
  for (std::vector<float>& tensor : *tensors) {
    ddl::TensorBuffer buffer;
    buffer.in = buffer.out = tensor.data();
    buffer.count = static_cast<int64_t>(tensor.size());
    buffer.dims = {buffer.count};
    request.tensors.push_back(buffer);
  }
  static std::vector<float> gathered;
  request.allocate = [](const std::vector<int64_t>& sizes, void** memory) {
    int64_t all = 0;
    for (const int64_t size : sizes) all += size;
    gathered.resize(all);
    *memory = gathered.data();
    return ddl::Status();
  };
  auto finished = std::make_shared<std::promise<ddl::Status>>();
  request.done = [finished](const ddl::Status& status) { finished->set_value(status); };
  std::future<ddl::Status> future = finished->get_future();
  ddl::Engine::Get().Submit(std::move(request));
  return future;
}

// What test_measurements.py expects to find in timeline and statistics.
bool Measured(const ddl::Topology& topology) {
  using Kind = ddl::Request::Kind;
  std::vector<std::vector<float>> small{std::vector<float>(1000, 1.0f)};
  std::vector<std::vector<float>> large(2, std::vector<float>(1000000, 1.0f));
  std::vector<std::vector<float>> weights{std::vector<float>(100000, 1.0f)};
  // 7,500 rows in all.
  const int rows_here = topology.size == 1 ? 7500 : topology.rank == 0 ? 2500 : 5000;
  std::vector<std::vector<float>> rows{std::vector<float>(rows_here, 1.0f)};
  if (topology.rank == 1) sleep(1);
  std::vector<std::future<ddl::Status>> begun;
  begun.push_back(Begin(Kind::kAllReduce, "AllReduceN", "small", &small));
  begun.push_back(Begin(Kind::kAllReduce, "AllReduceN", "large", &large));
  begun.push_back(Begin(Kind::kBroadcast, "Bcast", "weights", &weights));
  begun.push_back(Begin(Kind::kAllGather, "AllGather", "rows", &rows));
  for (auto& one : begun) {
    if (!one.get().ok()) return false;
  }
  return large[1].back() == topology.size;
}

// Submits `request` and waits for its end.
ddl::Status Run(ddl::Request request, ddl::Engine* engine = &ddl::Engine::Get()) {
  std::promise<ddl::Status> finished;
  request.done = [&finished](const ddl::Status& status) { finished.set_value(status); };
  engine->Submit(std::move(request));
  return finished.get_future().get();
}

// The gather of `rows` rows at `in`, each of `columns` elements. Where the memory for all rows
// comes from is left to the caller.
ddl::Request GatherOf(const char* name, ddl::DType dtype, const void* in, int64_t rows,
                      int64_t columns) {
  ddl::TensorBuffer buffer;
  buffer.in = in;
  buffer.count = rows * columns;
  buffer.dims = {rows, columns};
  ddl::Request request;
  request.kind = ddl::Request::Kind::kAllGather;
  request.op_name = "AllGather";
  request.name = name;
  request.dtype = dtype;
  request.tensors.push_back(buffer);
  return request;
}

void Total(int rank) {
  float values[] = {1.0f, static_cast<float>(rank)};
  ddl::TensorBuffer buffer;
  buffer.in = buffer.out = values;
  buffer.count = 2;
  buffer.dims = {2};
  ddl::Request request;
  request.op_name = "AllReduceN";
  request.name = "total";
  request.tensors.push_back(buffer);
  const ddl::Status status = Run(std::move(request));
  std::printf("<%d> %d %g\n", rank, static_cast<int>(status.code()),
              status.ok() ? values[0] * 100 + values[1] : 0.0f);
  std::fflush(stdout);
}

// Gathers more than 2^31 bytes: from rank 0 a little less, from the others three rows each.
bool GatherLarge(const ddl::Topology& topology) {
  constexpr int64_t kColumns = 1000, kLargeRows = (int64_t{1} << 31) / kColumns;
  const int64_t rows = topology.rank == 0 ? kLargeRows : 3;
  std::vector<char> in(rows * kColumns), out;
  in.front() = in.back() = static_cast<char>(topology.rank + 1);
  ddl::Request request = GatherOf("large", ddl::DType::kInt8, in.data(), rows, kColumns);
  request.allocate = [&out](const std::vector<int64_t>& sizes, void** memory) {
    int64_t all = 0;
    for (const int64_t size : sizes) all += size;
    out.resize(all * kColumns);
    *memory = out.data();
    return ddl::Status();
  };
  if (!Run(std::move(request)).ok()) return false;
  const int64_t others = topology.size - 1;
  if (static_cast<int64_t>(out.size()) != (kLargeRows + 3 * others) * kColumns) return false;
  int64_t first = 0;
  for (int rank = 0; rank < topology.size; ++rank) {
    const int64_t last = first + (rank == 0 ? kLargeRows : 3) * kColumns - 1;
    if (out[first] != rank + 1 || out[first + 1] != 0 || out[last] != rank + 1) return false;
    first = last + 1;
  }
  return true;
}

// Rank 1 has no memory for the result: an error on every rank, and the group goes on.
bool GatherWithoutMemory(const ddl::Topology& topology) {
  const int32_t in[] = {topology.rank, 7};
  ddl::Request request = GatherOf("rows", ddl::DType::kInt32, in, 2, 1);
  std::vector<char> out;
  request.allocate = [&](const std::vector<int64_t>& sizes, void** memory) {
    if (topology.rank == 1) return ddl::Status(ddl::Code::kInternal, "no memory");
    out.resize(sizes.size() * 8);
    *memory = out.data();
    return ddl::Status();
  };
  const ddl::Status status = Run(std::move(request));
  return status.code() == ddl::Code::kInternal &&
         status.message().find("rank 1 could not allocate the result of") != std::string::npos;
}

// Rank 1 starts late, with a setting that differs: until then rank 0's engine opens, and takes a
// request that it will have to refuse.
int StartInVain() {
  const char* number = std::getenv("OMPI_COMM_WORLD_RANK");
  const int rank = number == nullptr ? 0 : std::atoi(number);
  ddl::Topology topology;
  if (rank != 0) {
    setenv("DDL_TRANSPORT", "mpi", 1);
    usleep(1000 * 1000);
    return ddl::Engine::Get().Start(&topology).ok() ? 5 : 0;
  }
  std::thread starter([] {
    ddl::Topology found;
    (void)ddl::Engine::Get().Start(&found);
  });
  usleep(500 * 1000);
  std::vector<std::vector<float>> tensors{std::vector<float>(3, 1.0f)};
  std::future<ddl::Status> begun =
      Begin(ddl::Request::Kind::kAllReduce, "AllReduce", "early", &tensors);
  const bool answered = begun.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  std::printf("<0> %s\n", answered ? begun.get().message().c_str() : "no answer");
  std::fflush(stdout);
  if (!answered) _exit(0);
  starter.join();
  return 0;
}

// What a request's tensors point to, until it says that it is gone.
struct Memory {
  explicit Memory(int rank) : rank(rank) {}
  ~Memory() {
    std::printf("<%d> memory is free\n", rank);
    std::fflush(stdout);
  }
  const int rank;
  std::vector<char> bytes = std::vector<char>(1 << 20, 1);
};

// Rank 1 runs out of memory in the engine's thread, in the middle of a gather.
void GatherAndThrow(const ddl::Topology& topology, ddl::Engine* engine = &ddl::Engine::Get()) {
  auto memory = std::make_shared<Memory>(topology.rank);
  std::vector<char> out;
  ddl::Request request =
      GatherOf("rows", ddl::DType::kInt8, memory->bytes.data(), memory->bytes.size(), 1);
  request.memory = std::move(memory);
  request.allocate = [&](const std::vector<int64_t>& sizes, void** result) {
    if (topology.rank == 1) throw std::bad_alloc();
    out.resize(sizes.size() << 20);
    *result = out.data();
    return ddl::Status();
  };
  const ddl::Status status = Run(std::move(request), engine);
  std::printf("<%d> %s\n", topology.rank, status.message().c_str());
  std::fflush(stdout);
  static std::vector<char> kept;  // MPI may still write to it
  kept = std::move(out);
}

// The same in a process set of all ranks; then the others gather beside it.
bool ThrowInProcessSet(const ddl::Topology& topology) {
  std::vector<int> all(topology.size);
  for (int rank = 0; rank < topology.size; ++rank) all[rank] = rank;
  ddl::Engine* engine = nullptr;
  if (!ddl::ProcessSets::Get().Add(1, all).ok()) return false;
  if (!ddl::ProcessSets::Get().Find(1, &engine).ok()) return false;
  GatherAndThrow(topology, engine);
  std::printf("<%d> beside it\n", topology.rank);
  // Rank 0 waits for rank 1 in the set as long as this rank would wait for it here.
  if (topology.rank == 1) usleep(1'000'000);
  auto memory = std::make_shared<Memory>(topology.rank);
  std::vector<char> out;
  ddl::Request request =
      GatherOf("healthy", ddl::DType::kInt8, memory->bytes.data(), memory->bytes.size(), 1);
  request.memory = std::move(memory);
  request.allocate = [&](const std::vector<int64_t>& sizes, void** result) {
    out.resize(sizes.size() << 20);
    *result = out.data();
    return ddl::Status();
  };
  return Run(std::move(request)).ok();
}

// Three sums of one graph, in an order that differs by rank in every step: small ones, which travel
// with the agreement, and a large one. Other values in every step, so that none meets an old one.
bool SumCrossed(const ddl::Topology& topology, int step) {
  static constexpr int64_t kCounts[] = {3, 50000, 1};
  std::vector<float> values[3];
  std::promise<ddl::Status> finished[3];
  for (int i = 0; i < 3; ++i) {
    const int which = (i + step * topology.rank) % 3;
    values[which].assign(kCounts[which], static_cast<float>(100 * which + step + topology.rank));
    ddl::TensorBuffer buffer;
    buffer.in = buffer.out = values[which].data();
    buffer.count = kCounts[which];
    buffer.dims = {kCounts[which]};
    ddl::Request request;
    request.op_name = "AllReduce";
    request.name = "crossed_" + std::to_string(which);
    request.ordered = false;
    request.tensors.push_back(buffer);
    request.done = [&promise = finished[which]](const ddl::Status& status) {
      promise.set_value(status);
    };
    ddl::Engine::Get().Submit(std::move(request));
  }
  const int ranks = topology.size;
  for (int which = 0; which < 3; ++which) {
    if (!finished[which].get_future().get().ok()) return false;
    const float want = static_cast<float>(ranks * (100 * which + step) + ranks * (ranks - 1) / 2);
    if (values[which].front() != want || values[which].back() != want) return false;
  }
  return true;
}

// Waits until all ranks have come here, beside all other requests.
bool Barrier() {
  float value = 1.0f;
  ddl::TensorBuffer buffer;
  buffer.in = buffer.out = &value;
  buffer.count = 1;
  buffer.dims = {1};
  ddl::Request request;
  request.op_name = "AllReduce";
  request.name = "barrier";
  request.ordered = false;
  request.tensors.push_back(buffer);
  return Run(std::move(request)).ok();
}

// Rank 1 cannot tell two requests apart: it breaks the group when the first has run.
bool CollideOnRank1(const ddl::Topology& topology) {
  const int count = topology.rank == 1 ? 2 : 1;
  float values[2] = {1.0f, 1.0f};
  std::promise<ddl::Status> finished[2];
  std::vector<ddl::Request> requests(count);
  for (int i = 0; i < count; ++i) {
    ddl::TensorBuffer buffer;
    buffer.in = buffer.out = &values[i];
    buffer.count = 1;
    buffer.dims = {1};
    requests[i].op_name = "AllReduce";
    requests[i].name = "loss";
    requests[i].ordered = false;
    requests[i].run = requests[i].session = i + 1;
    requests[i].tensors.push_back(buffer);
    requests[i].done = [&promise = finished[i]](const ddl::Status& status) {
      promise.set_value(status);
    };
  }
  // Not before rank 1 has asked for both: the first would run, and none be told apart.
  if (topology.rank != 1 && !Barrier()) return false;
  for (ddl::Request& request : requests) ddl::Engine::Get().Submit(std::move(request));
  if (topology.rank == 1 && !Barrier()) return false;
  bool ok = true;
  for (int i = 0; i < count; ++i) ok = finished[i].get_future().get().ok() && ok;
  return ok == (topology.rank != 1);
}

// Rank `first` joins at once; what the others sum is more than MPI sends with the first part of a
// message.
bool SumManyBeforeJoining(const ddl::Topology& topology, int first) {
  if (topology.rank != first) {
    std::vector<float> values(400, 1.0f);
    ddl::Request request;
    request.op_name = "AllReduceN";
    request.name = "gradients";
    for (float& value : values) {
      ddl::TensorBuffer buffer;
      buffer.in = buffer.out = &value;
      buffer.count = 1;
      buffer.dims = std::vector<int64_t>(10, 1);
      request.tensors.push_back(buffer);
    }
    const ddl::Status status = Run(std::move(request));
    std::fprintf(stderr, "%s\n", status.message().c_str());
    if (!status.ok() || values.back() != topology.size - 1) return false;
  }
  ddl::Request join;
  join.kind = ddl::Request::Kind::kJoin;
  join.op_name = "Join";
  int last = -1;
  join.joined = [&last](int rank) { last = rank; };
  return Run(std::move(join)).ok() && last == (topology.size == 2 ? 1 - first : 2);
}

// Of limits.py: the test's DDL_STALL_TIMEOUT grows with it.
useconds_t Microseconds(double seconds) {
  const char* slowness = std::getenv("TESTS_SLOWNESS");
  return static_cast<useconds_t>(1e6 * seconds * (slowness ? std::atof(slowness) : 1.0));
}

// Lets this process stand still for longer than the limit, a while after it has written to what is
// returned, and the late one for longer. To be called before MPI starts. `who`: all, or rank <n>,
// which is late; -1 for the others.
int BeginToStandStill(const char* who, const char* late) {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (rank != nullptr && std::strncmp(who, "rank ", 5) == 0) {
    late = who + std::strlen("rank ");
    if (*rank != *late) return -1;
  }
  const double limit_s = std::atof(std::getenv("DDL_STALL_TIMEOUT"));
  int ends[2];
  if (pipe(ends) != 0 || rank == nullptr) std::abort();
  const pid_t process = getpid();
  if (fork() != 0) return ends[1];
  close(ends[1]);  // so that it ends with the rank
  char begun;
  if (read(ends[0], &begun, 1) != 1) _exit(1);
  usleep(Microseconds(0.3));
  kill(process, SIGSTOP);
  usleep(static_cast<useconds_t>(1.3e6 * limit_s));
  if (*rank == *late) usleep(Microseconds(0.5));
  kill(process, SIGCONT);
  _exit(0);
}

}  // namespace

// In the place of MPI's, which has it under another name for this. Source: MPI-4.1 section 15.2.
extern "C" int MPI_Isend(const void* bytes, int count, MPI_Datatype type, int peer, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  const int begun = PMPI_Isend(bytes, count, type, peer, tag, comm, request);
  constexpr int kLong = 8192;
  if (count > kLong && still_in_message >= 0) {
    if (write(still_in_message, "", 1) != 1) std::abort();
    still_in_message = -1;
    raise(SIGSTOP);
  }
  return begun;
}

int main(int count, char** arguments) {
  if (std::strcmp(arguments[1], "soak") == 0) return Soak(count, arguments);
  if (std::strcmp(arguments[1], "large") == 0) return OneLarge(count, arguments);
  if (std::strcmp(arguments[1], "in vain") == 0) return StartInVain();
  const char* how = arguments[1];
  const int still =
      count > 2 ? BeginToStandStill(arguments[2], how + std::strlen("rank ")) : -1;
  ddl::Topology topology;
  const ddl::Status started = ddl::Engine::Get().Start(&topology);
  if (!started.ok()) {
    std::fprintf(stderr, "%s\n", started.message().c_str());
    return 1;
  }
  Total(topology.rank);
  if (std::strcmp(how, "long proposal") == 0) {
    still_in_message = still;
    (void)SumManyBeforeJoining(topology, 0);
  } else if (still >= 0 && write(still, "", 1) != 1) {
    return 6;
  }
  if (std::strcmp(how, "large gather") == 0 && !GatherLarge(topology)) return 2;
  if (std::strcmp(how, "no memory") == 0 && !GatherWithoutMemory(topology)) return 3;
  if (std::strcmp(how, "throws") == 0) GatherAndThrow(topology);
  if (std::strcmp(how, "throws in a process set") == 0 && !ThrowInProcessSet(topology)) return 9;
  if (std::strcmp(how, "measured") == 0) return Measured(topology) ? 0 : 4;
  const useconds_t late_us = Microseconds(1.8);
  if (std::strcmp(how, "rank 0 is missing") == 0 && topology.rank == 0) usleep(late_us);
  if (std::strcmp(how, "rank 1 is missing") == 0 && topology.rank == 1) usleep(late_us);
  if (std::strcmp(how, "rank 0 leaves") == 0 && topology.rank == 0) return 0;
  if (std::strcmp(how, "rank 1 leaves") == 0 && topology.rank == 1) return 0;
  if (std::strcmp(how, "two sessions") == 0 && !CollideOnRank1(topology)) return 7;
  if (std::strcmp(how, "long description") == 0 && !SumManyBeforeJoining(topology, 1)) return 8;
  if (std::strcmp(how, "crossed order") == 0) {
    for (int step = 0; step < 200; ++step) {
      if (!SumCrossed(topology, step)) return 4;
    }
  }
  for (int i = 0; i < 50; ++i) Total(topology.rank);
  return 0;
}
