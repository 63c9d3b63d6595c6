// A stand-in for NCCL and CUDA, in the memory of threads that are ranks. It shows what we ask of
// them, in which order, and what we make of their answers; it shows nothing about NCCL itself.

#include "comm/nccl_communicator.h"

#include <cstring>

#include "ranks.h"
#include "thread_communicator.h"
#include "values.h"

struct CUstream_st {};
struct CUevent_st {};
struct ncclComm {};

namespace {

using ddl::Code;
using ddl::DType;
using ddl::GpuContext;
using ddl::HostGroup;
using ddl::NcclCommunicator;
using ddl::Status;

constexpr int kGpu = 3;
constexpr int kRemoteError = 6;  // ncclRemoteError

// What the stand-in of one rank has been asked, and what it shall answer.
struct StandIn {
  HostGroup* group = nullptr;
  std::vector<std::string> calls;
  std::vector<std::function<void()>> enqueued;
  int polls_in_progress = 0;  // of the next, so many find NCCL's threads still at work
  int polls_not_ready = 0;    // likewise, the GPU
  int init_result = ddl::kNcclSuccess;
  int async_result = ddl::kNcclSuccess;  // once a group has ended
  bool stuck = false;                    // what is in the stream never ends
  int events = 0, comms = 0, streams = 0;
};

thread_local StandIn* rank_stand_in = nullptr;

StandIn& Mine() { return *rank_stand_in; }

int Note(const std::string& call, int result = 0) {
  Mine().calls.push_back(call);
  return result;
}

int Init(ddl::NcclComm* comm, int size, ddl::NcclUniqueId id, int rank, ddl::NcclConfig* config) {
  CHECK(size == Mine().group->size() && rank == Mine().group->rank(), "");
  CHECK(std::strcmp(id.bytes, "made by rank 0") == 0, id.bytes);
  CHECK(config->size == 24 && config->version == 21400 && config->blocking == 0, "");
  *comm = new ncclComm;
  ++Mine().comms;
  Mine().polls_in_progress = 3;
  return Note("init", Mine().init_result == 0 ? ddl::kNcclInProgress : Mine().init_result);
}

int AsyncError(ddl::NcclComm, int* state) {
  *state = Mine().polls_in_progress-- > 0 ? ddl::kNcclInProgress : Mine().async_result;
  return 0;
}

int GroupEnd() {
  for (const auto& work : Mine().enqueued) work();
  Mine().enqueued.clear();
  Mine().polls_in_progress = 2;
  return Note("group end", ddl::kNcclInProgress);
}

int AllReduce(const void* in, void* out, size_t count, int dtype, int op, ddl::NcclComm,
              ddl::CudaStream) {
  HostGroup* group = Mine().group;
  Mine().enqueued.push_back([=] {
    const bool is_double = dtype == ddl::kNcclFloat64;
    if (!is_double && dtype != ddl::kNcclFloat32) return;
    const Status status = ddl::AllReduceInPieces(
        group, in, out, static_cast<int64_t>(count), is_double ? DType::kFloat64 : DType::kFloat32,
        op == ddl::kNcclAverage ? group->size() : 1);
    CHECK(status.ok(), status.message());
  });
  return Note("allreduce " + std::to_string(count) + " of type " + std::to_string(dtype) +
              " op " + std::to_string(op));
}

int Broadcast(const void* in, void* out, size_t nbytes, int dtype, int root, ddl::NcclComm,
              ddl::CudaStream) {
  CHECK(dtype == ddl::kNcclBytes, "");
  HostGroup* group = Mine().group;
  Mine().enqueued.push_back([=] {
    std::vector<int32_t> wide(nbytes, 0);
    for (size_t i = 0; i < nbytes && group->rank() == root; ++i) {
      wide[i] = static_cast<const unsigned char*>(in)[i];
    }
    const Status status = ddl::AllReduceInPieces(group, wide.data(), wide.data(),
                                                 static_cast<int64_t>(nbytes), DType::kInt32, 1);
    CHECK(status.ok(), status.message());
    for (size_t i = 0; i < nbytes; ++i) static_cast<unsigned char*>(out)[i] = wide[i];
  });
  return Note("broadcast " + std::to_string(nbytes) + " from " + std::to_string(root));
}

int EventQuery(ddl::CudaEvent) {
  return Mine().stuck || Mine().polls_not_ready-- > 0 ? ddl::kCudaNotReady : Note("done");
}

const ddl::NcclLibrary kStandIn = [] {
  ddl::NcclLibrary made{};
  made.ncclGetUniqueId = [](ddl::NcclUniqueId* id) {
    std::strcpy(id->bytes, "made by rank 0");
    return Note("unique id");
  };
  made.ncclCommInitRankConfig = Init;
  made.ncclCommGetAsyncError = AsyncError;
  made.ncclCommAbort = [](ddl::NcclComm comm) {
    delete comm;
    --Mine().comms;
    return Note("abort");
  };
  made.ncclGroupStart = [] { return Note("group start"); };
  made.ncclGroupEnd = GroupEnd;
  made.ncclAllReduce = AllReduce;
  made.ncclBroadcast = Broadcast;
  made.ncclGetErrorString = [](int) { return "remote process exited"; };
  made.ncclGetLastError = [](ddl::NcclComm) { return "socket closed"; };
  made.cudaSetDevice = [](int gpu) {
    CHECK(gpu == kGpu, std::to_string(gpu));
    return 0;
  };
  made.cudaStreamCreateWithFlags = [](ddl::CudaStream* stream, unsigned int flags) {
    CHECK(flags == ddl::kCudaStreamNonBlocking, "");
    *stream = new CUstream_st;
    ++Mine().streams;
    return 0;
  };
  made.cudaStreamDestroy = [](ddl::CudaStream stream) {
    delete stream;
    --Mine().streams;
    return 0;
  };
  made.cudaStreamWaitEvent = [](ddl::CudaStream, ddl::CudaEvent event, unsigned int) {
    CHECK(event != nullptr, "");
    return Note("wait for the script's stream");
  };
  made.cudaEventCreateWithFlags = [](ddl::CudaEvent* event, unsigned int) {
    *event = new CUevent_st;
    ++Mine().events;
    return 0;
  };
  made.cudaEventDestroy = [](ddl::CudaEvent event) {
    delete event;
    --Mine().events;
    return 0;
  };
  made.cudaEventRecord = [](ddl::CudaEvent, ddl::CudaStream stream) {
    return Note(stream == nullptr ? "mark the script's stream" : "mark ours");
  };
  made.cudaEventQuery = EventQuery;
  made.cudaGetErrorString = [](int) { return "no such device"; };
  return made;
}();

GpuContext ReadyGpu(int gpu = kGpu) {
  GpuContext context;
  context.device = kGpu;
  const Status status = ddl::MarkReady(kStandIn, &context);
  CHECK(status.ok(), status.message());
  context.device = gpu;
  return context;
}

// Runs `function` on `size` ranks, and checks that nothing of NCCL's or CUDA's is left over.
void OnGpus(int size, const std::function<void(NcclCommunicator&, StandIn&)>& function,
            double timeout_s = 30) {
  RunThreads(size, [&](HostGroup& group) {
    StandIn mine;
    mine.group = &group;
    rank_stand_in = &mine;
    ThreadCommunicator host(&group);
    {
      NcclCommunicator gpus(kStandIn, &host, timeout_s);
      function(gpus, mine);
    }
    CHECK(mine.events == 0 && mine.comms == 0 && mine.streams == 0, "");
  });
}

void CheckCalls(const StandIn& mine, const std::vector<std::string>& expected) {
  std::string got;
  for (const std::string& call : mine.calls) got += call + "; ";
  CHECK(mine.calls == expected, got);
}

Status ReduceOne(NcclCommunicator& gpus) {
  float value = 1;
  return gpus.AllReduce(ReadyGpu(), {{&value, &value, 1}}, DType::kFloat32, false);
}

void CheckError(const Status& status, Code code, const std::string& text) {
  CHECK(status.code() == code, std::to_string(static_cast<int>(status.code())) + status.message());
  CHECK(status.message().find(text) != std::string::npos, status.message());
}

TEST(GpuTensorsAreReducedInOneGroupBehindTheScriptsWork) {
  for (int size = 1; size <= 4; ++size) {
    OnGpus(size, [size](NcclCommunicator& gpus, StandIn& mine) {
      const int rank = mine.group->rank();
      std::vector<float> first = ValuesOf<float>(70'001, rank, size), result(70'001);
      std::vector<float> second = ValuesOf<float>(5, rank, size);
      mine.polls_not_ready = 3;
      const Status status = gpus.AllReduce(ReadyGpu(),
                                           {{first.data(), result.data(), 70'001},
                                            {nullptr, nullptr, 0},
                                            {second.data(), second.data(), 5}},
                                           DType::kFloat32, false);
      CHECK(status.ok(), status.message());
      CheckTotal(result, size, 1, "not in place");
      CheckTotal(second, size, 1, "in place");
      std::vector<std::string> expected = {"mark the script's stream"};
      if (rank == 0) expected.push_back("unique id");
      for (const char* call :
           {"init", "wait for the script's stream", "group start", "allreduce 70001 of type 7 op 0",
            "allreduce 5 of type 7 op 0", "group end", "mark ours", "done"}) {
        expected.push_back(call);
      }
      CheckCalls(mine, expected);

      mine.calls.clear();  // the second time NCCL runs already
      std::vector<double> mean = ValuesOf<double>(9, rank, size);
      const Status averaged =
          gpus.AllReduce(ReadyGpu(), {{mean.data(), mean.data(), 9}}, DType::kFloat64, true);
      CHECK(averaged.ok(), averaged.message());
      CheckTotal(mean, size, size, "average");
      CheckCalls(mine, {"mark the script's stream", "wait for the script's stream", "group start",
                        "allreduce 9 of type 8 op 4", "group end", "mark ours", "done"});
    });
  }
}

TEST(GpuHalvesKeepTheirTypes) {
  OnGpus(2, [](NcclCommunicator& gpus, StandIn& mine) {
    for (const auto& [dtype, call] : {std::pair(DType::kFloat16, "allreduce 1 of type 6 op 0"),
                                      std::pair(DType::kBfloat16, "allreduce 1 of type 9 op 0")}) {
      uint16_t half = 0;
      mine.calls.clear();
      const Status status = gpus.AllReduce(ReadyGpu(), {{&half, &half, 1}}, dtype, false);
      CHECK(status.ok(), status.message());
      CHECK(std::count(mine.calls.begin(), mine.calls.end(), call) == 1, call);
    }
  });
}

TEST(GpuTensorsAreReducedInEveryWay) {
  using ddl::ReduceOp;
  OnGpus(2, [](NcclCommunicator& gpus, StandIn& mine) {
    for (const auto& [op, number] : {std::pair(ReduceOp::kProduct, ddl::kNcclProduct),
                                     std::pair(ReduceOp::kMax, ddl::kNcclMax),
                                     std::pair(ReduceOp::kMin, ddl::kNcclMin)}) {
      float value = 0;
      mine.calls.clear();
      const Status status =
          gpus.AllReduce(ReadyGpu(), {{&value, &value, 1}}, DType::kFloat32, false, op);
      CHECK(status.ok(), status.message());
      const std::string call = "allreduce 1 of type 7 op " + std::to_string(number);
      CHECK(std::count(mine.calls.begin(), mine.calls.end(), call) == 1, call);
    }
  });
}

TEST(GpuBroadcastGivesTheBytesOfTheRoot) {
  OnGpus(3, [](NcclCommunicator& gpus, StandIn& mine) {
    const int rank = mine.group->rank();
    for (const int count : {0, 1, 1001}) {
      std::vector<unsigned char> bytes(count), got(count);
      for (int i = 0; i < count; ++i) bytes[i] = static_cast<unsigned char>(i * 7 + rank);
      const Status status = gpus.Broadcast(ReadyGpu(), bytes.data(), got.data(), count, 2);
      CHECK(status.ok(), status.message());
      for (int i = 0; i < count; ++i) CHECK(got[i] == static_cast<unsigned char>(i * 7 + 2), "");
    }
  });
}

TEST(GpuGatherJoinsDifferentSizes) {
  for (int size = 1; size <= 4; ++size) {
    OnGpus(size, [size](NcclCommunicator& gpus, StandIn& mine) {
      const int rank = mine.group->rank();
      std::vector<int64_t> nbytes;
      std::string expected;
      for (int r = 0; r < size; ++r) {
        nbytes.push_back(5 * r);  // rank 0 has nothing
        expected += std::string(5 * r, static_cast<char>('a' + r));
      }
      const std::string own(nbytes[rank], static_cast<char>('a' + rank));
      std::string all(expected.size(), '?');
      const Status status = gpus.AllGather(ReadyGpu(), own.data(), all.data(), nbytes);
      CHECK(status.ok(), status.message());
      CHECK(all == expected, all);
    });
  }
}

TEST(GpuErrorIsNamedEndsTheGroupAndStays) {
  OnGpus(2, [](NcclCommunicator& gpus, StandIn& mine) {
    CHECK(ReduceOne(gpus).ok(), "");
    mine.async_result = kRemoteError;
    const std::string text = "failed: remote process exited: socket closed. NCCL_DEBUG=INFO";
    CheckError(ReduceOne(gpus), Code::kInternal, text);
    CHECK(mine.comms == 0 && mine.calls.back() == "abort", "");
    mine.async_result = ddl::kNcclSuccess;
    mine.calls.clear();
    CheckError(ReduceOne(gpus), Code::kInternal, text);
    CheckCalls(mine, {"mark the script's stream"});
  });
}

TEST(GpuThatNeverEndsIsAnErrorWithinTheTimeout) {
  OnGpus(
      2,
      [](NcclCommunicator& gpus, StandIn& mine) {
        CHECK(ReduceOne(gpus).ok(), "");
        mine.stuck = true;
        CheckError(ReduceOne(gpus), Code::kDeadlineExceeded,
                   "did not end within 1.0 s (DDL_STALL_TIMEOUT)");
        CHECK(mine.comms == 0 && mine.calls.back() == "abort", "");
      },
      1.0);
}

TEST(NcclThatCannotStartOnOneRankIsAnErrorOnAll) {
  OnGpus(3, [](NcclCommunicator& gpus, StandIn& mine) {
    const bool odd = mine.group->rank() == 1;
    if (odd) mine.init_result = 5;  // ncclInvalidUsage: two ranks on one GPU
    CheckError(ReduceOne(gpus), Code::kFailedPrecondition,
               odd ? "NCCL did not start: ncclCommInitRankConfig failed: remote process exited"
                   : "NCCL did not start on 1 other ranks; they say why.");
    CheckError(ReduceOne(gpus), Code::kFailedPrecondition, "or set DDL_GPU=host");
  });
}

TEST(TensorOnAnotherGpuIsRefused) {
  OnGpus(1, [](NcclCommunicator& gpus, StandIn&) {
    CHECK(ReduceOne(gpus).ok(), "");
    float value = 1;
    CheckError(gpus.AllReduce(ReadyGpu(kGpu + 1), {{&value, &value, 1}}, DType::kFloat32, false),
               Code::kFailedPrecondition, "has a tensor on GPU 4, but NCCL started on its GPU 3");
  });
}

TEST(RanksDecideTogetherWhetherGpusAreUsed) {
  RunThreads(3, [](HostGroup& group) {
    ThreadCommunicator host(&group);
    std::unique_ptr<NcclCommunicator> gpus;
    std::string why;
    using ddl::GpuTransport;
    const Status none = ddl::ConnectGpus(GpuTransport::kHost, 30, &host, &gpus, &why);
    CHECK(none.ok() && gpus == nullptr && why == "DDL_GPU is host", why);
    const Status mixed =
        ddl::ConnectGpus(group.rank() == 2 ? GpuTransport::kHost : GpuTransport::kAuto, 30, &host,
                         &gpus, &why);
    CheckError(mixed, Code::kFailedPrecondition, "DDL_GPU differs among the ranks");
    const Status either = ddl::ConnectGpus(GpuTransport::kAuto, 30, &host, &gpus, &why);
    CHECK(either.ok() && (gpus != nullptr || !why.empty()), either.message());
    const bool can = gpus != nullptr;
    const Status must = ddl::ConnectGpus(GpuTransport::kNccl, 30, &host, &gpus, &why);
    CHECK(must.ok() == can, must.message());
    if (!can) CheckError(must, Code::kFailedPrecondition, "DDL_GPU is nccl, but ");
  });
}

}  // namespace
