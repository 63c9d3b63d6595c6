// Several threads of each rank.

#include "transport/host_channels.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>

#include "algorithms/pieces.h"
#include "allocations.h"
#include "comm/shm_communicator.h"
#include "ranks.h"
#include "thread_communicator.h"
#include "values.h"

namespace {

using ddl::DType;
using ddl::HostChannels;
using ddl::HostGroup;
using ddl::Status;

constexpr int64_t kChannel = HostChannels::kChannelBytes;

// Memory of a host whose ranks have so many channels, for all ranks or for one that is a process.
std::unique_ptr<ddl::HostMemory> JoinChannels(char* base, int rank, int size, int channels,
                                              double timeout_s = 60) {
  auto memory = std::make_unique<ddl::HostMemory>();
  memory->group = std::make_unique<HostGroup>(base, rank, size, timeout_s);
  std::vector<void*> others;
  for (int channel = 1; channel < channels; ++channel) {
    others.push_back(base + channel * HostGroup::Nbytes(size));
  }
  memory->channels = std::make_unique<HostChannels>(memory->group.get(), others);
  return memory;
}

void FormatChannels(char* base, int size, int channels) {
  for (int channel = 0; channel < channels; ++channel) {
    HostGroup::Format(base + channel * HostGroup::Nbytes(size), size);
  }
}

using MemoryFunction = std::function<void(int rank, std::unique_ptr<ddl::HostMemory>)>;

// Runs `function` on `size` ranks that are threads, each with so many channels.
void RunWithChannels(int size, int channels, const MemoryFunction& function) {
  std::unique_ptr<char, void (*)(void*)> base(
      static_cast<char*>(std::aligned_alloc(4096, channels * HostGroup::Nbytes(size))), std::free);
  FormatChannels(base.get(), size, channels);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back(
        [&, rank] { function(rank, JoinChannels(base.get(), rank, size, channels)); });
  }
  for (std::thread& thread : threads) thread.join();
}

class BaseCommunicator : public ThreadCommunicator {
 public:
  BaseCommunicator(int rank, int size) : ThreadCommunicator(nullptr), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }

 private:
  const int rank_, size_;
};

// Magnitudes over 12 decades, so that another order of additions gives other bits.
std::vector<float> ManyMagnitudes(int64_t count, int seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> mantissa(-1, 1), exponent(-6, 6);
  std::vector<float> values(count);
  for (float& value : values) value = mantissa(random) * std::pow(10.0f, exponent(random));
  return values;
}

TEST(BitsDoNotDependOnHowManyChannelsThereAre) {
  // Of 3 channels' bytes and more; the tensors end anywhere.
  const std::vector<int64_t> counts = {500'003, 7, 0, 33, 600'001, 5};
  for (const int size : {2, 3}) {
    std::vector<std::vector<float>> want;
    for (int channels = 1; channels <= 4; ++channels) {
      RunWithChannels(size, channels, [&](int rank, std::unique_ptr<ddl::HostMemory> memory) {
        ddl::ShmCommunicator group(std::make_unique<BaseCommunicator>(rank, size),
                                   std::move(memory));
        std::vector<std::vector<float>> ins, outs;
        std::vector<ddl::TensorSpan> tensors;
        for (const int64_t count : counts) {
          ins.push_back(ManyMagnitudes(count, static_cast<int>(100 * ins.size()) + rank));
          outs.emplace_back(count);
        }
        for (size_t i = 0; i < counts.size(); ++i) {
          tensors.push_back({ins[i].data(), outs[i].data(), counts[i]});
        }
        const Status status = group.AllReduceN(tensors, DType::kFloat32, size);
        CHECK(status.ok(), status.message());
        if (channels == 1 && rank == 0) want = outs;
        if (rank > 0) return;
        for (size_t i = 0; i < counts.size(); ++i) {
          CHECK(counts[i] == 0 || std::memcmp(outs[i].data(), want[i].data(), counts[i] * 4) == 0,
                std::to_string(channels) + " channels, tensor " + std::to_string(i));
        }
      });
    }
  }
}

template <typename T>
void AllReduceOnce(ddl::Communicator& group, int64_t count, bool in_place, int divisor) {
  std::vector<T> values = ValuesOf<T>(count, group.rank(), group.size()), results(count);
  T* out = in_place ? values.data() : results.data();
  const Status status = group.AllReduce(values.data(), out, count, kDTypeOf<T>, divisor);
  CHECK(status.ok(), status.message());
  CheckTotal(in_place ? values : results, group.size(), divisor, "channels");
}

TEST(CollectivesOfChannelsAreExact) {
  for (const int channels : {2, 3}) {
    RunWithChannels(3, channels, [](int rank, std::unique_ptr<ddl::HostMemory> memory) {
      ddl::ShmCommunicator group(std::make_unique<BaseCommunicator>(rank, 3), std::move(memory));
      // One channel and several in turn: what one leaves behind must not lead the next astray.
      for (const int64_t nbytes : {kChannel, 2 * kChannel, int64_t{1000}, 3 * kChannel + 4}) {
        AllReduceOnce<float>(group, nbytes / 4, true, 3);
        AllReduceOnce<int64_t>(group, nbytes / 8, false, 1);
        std::vector<char> want(nbytes);
        for (int64_t i = 0; i < nbytes; ++i) want[i] = static_cast<char>(i % 251);
        std::vector<char> got = rank == 1 ? want : std::vector<char>(nbytes);
        Status status = group.Broadcast(got.data(), nbytes, 1);
        CHECK(status.ok() && got == want, status.message());
        // Uneven parts, and none; in place and not.
        const std::vector<int64_t> parts = {nbytes / 3 + 1, 0, nbytes - nbytes / 3 - 1};
        std::vector<char> joined(nbytes);
        const int64_t begin = rank == 2 ? parts[0] : 0;
        const std::vector<char> own(want.begin() + begin, want.begin() + begin + parts[rank]);
        status = group.AllGather(own.data(), joined.data(), parts);
        CHECK(status.ok() && joined == want, status.message());
      }
    });
  }
}

TEST(ThereAreAsManyChannelsAsTheBytesAreWorth) {
  RunWithChannels(2, 4, [](int, std::unique_ptr<ddl::HostMemory> memory) {
    for (const auto& [nbytes, want] :
         {std::pair{int64_t{0}, 1}, std::pair{2 * kChannel - 1, 1}, std::pair{2 * kChannel, 2},
          std::pair{4 * kChannel - 1, 3}, std::pair{100 * kChannel, 4}}) {
      std::atomic<int> ran{0}, seen{0};
      const std::thread::id caller = std::this_thread::get_id();
      const Status status = memory->channels->Run(nbytes, [&](HostGroup* group, int channel,
                                                              int channels) {
        ran += 1 << channel;
        seen = channels;
        CHECK((channel == 0) == (group == memory->group.get()), "");
        CHECK((channel == 0) == (std::this_thread::get_id() == caller), "the first is the caller");
        return Status();
      });
      CHECK(status.ok(), status.message());
      CHECK(seen == want && ran == (1 << want) - 1, std::to_string(ran));
    }
  });
}

TEST(ErrorOfAChannelBreaksAllChannelsOfAllRanks) {
  for (const bool throws : {false, true}) {
    for (const int bad : {0, 1, 2}) {
      std::string said[2];
      const auto start = std::chrono::steady_clock::now();
      RunWithChannels(2, 3, [&](int rank, std::unique_ptr<ddl::HostMemory> memory) {
        std::vector<float> values(3 * kChannel / 4);
        const ddl::TensorList list({{values.data(), values.data(), 3 * kChannel / 4}}, 4);
        const auto reduce = [&](HostGroup* group, int channel, int channels) {
          if (rank == 1 && channel == bad) {
            if (throws) throw std::runtime_error("no memory");
            return Status(ddl::Code::kInternal, "no memory");
          }
          const ddl::Range part = ddl::SplitAtCacheLines({0, list.nbytes()}, channels)[channel];
          return ddl::AllReduceInPieces(group, list, part, DType::kFloat32, 1);
        };
        Status status;
        while (status.ok()) status = memory->channels->Run(list.nbytes(), reduce);
        said[rank] = status.message();
        for (const int64_t nbytes : {int64_t{4}, 3 * kChannel}) {
          const Status again = memory->channels->Run(nbytes, [](HostGroup* group, int, int) {
            std::vector<float> more(100);
            return ddl::AllReduceInPieces(group, more.data(), more.data(), 100, DType::kFloat32, 1);
          });
          CHECK(again.message() == status.message(), "the error stays");
        }
      });
      CHECK(said[0] == said[1], said[0] + ", " + said[1]);
      CHECK(said[0].find("no memory") != std::string::npos, said[0]);
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30), "the timeout");
    }
  }
}

// The next ones of this thread.
thread_local int failing_allocations = 0;

// What the thread throws because it has no memory for an error must not get lost.
TEST(AChannelThatCannotSayWhyItFailsBreaksAllChannelsOfAllRanks) {
  allocation_fails = [](size_t) { return failing_allocations > 0 && failing_allocations-- > 0; };
  std::string said[2];
  RunWithChannels(2, 2, [&](int rank, std::unique_ptr<ddl::HostMemory> memory) {
    std::vector<float> values(2 * kChannel / 4);
    const ddl::TensorList list({{values.data(), values.data(), 2 * kChannel / 4}}, 4);
    const Status status =
        memory->channels->Run(list.nbytes(), [&](HostGroup* group, int channel, int channels) {
          if (rank == 1 && channel == 1) {
            failing_allocations = 1;
            throw std::bad_alloc();
          }
          const ddl::Range part = ddl::SplitAtCacheLines({0, list.nbytes()}, channels)[channel];
          return ddl::AllReduceInPieces(group, list, part, DType::kFloat32, 1);
        });
    CHECK(status.code() == ddl::Code::kInternal, status.message());
    said[rank] = status.message();
  });
  allocation_fails = nullptr;
  CHECK(said[0] == said[1] && said[0].find("could not go on") != std::string::npos,
        said[0] + ", " + said[1]);
}

TEST(DeathOfAPeerWithChannelsIsAnErrorOnTheOthers) {
  constexpr int kSize = 3, kChannels = 2;
  for (const int victim : {0, 2}) {
    ddl::SharedSegment segment;
    ddl::SharedSegment::Address address;
    const Status made = segment.Create(kChannels * HostGroup::Nbytes(kSize), &address);
    CHECK(made.ok(), made.message());
    FormatChannels(static_cast<char*>(segment.base()), kSize, kChannels);
    SharedCount at_work;
    std::fflush(nullptr);
    std::vector<pid_t> children;
    for (int rank = 0; rank < kSize; ++rank) {
      children.push_back(fork());
      if (children.back() != 0) continue;
      failed_checks = 0;
      {
        ddl::ShmCommunicator group(
            std::make_unique<BaseCommunicator>(rank, kSize),
            JoinChannels(static_cast<char*>(segment.base()), rank, kSize, kChannels));
        std::vector<float> values(2 * kChannel / 4);
        const auto reduce = [&] {
          return group.AllReduce(values.data(), values.data(), 2 * kChannel / 4, DType::kFloat32,
                                 1);
        };
        Status status = reduce();
        CHECK(status.ok(), status.message());
        at_work.Add();
        while (status.ok()) status = reduce();
        CHECK(status.code() == ddl::Code::kAborted, status.message());
        CHECK(status.message().find("rank " + std::to_string(victim) + " has ended") == 0,
              status.message());
      }
      _exit(failed_checks == 0 ? 0 : 1);
    }
    at_work.Await(kSize);
    usleep(10'000);
    kill(children[victim], SIGKILL);
    for (int rank = 0; rank < kSize; ++rank) {
      int status = 0;
      waitpid(children[rank], &status, 0);
      CHECK(rank == victim || (WIFEXITED(status) && WEXITSTATUS(status) == 0),
            "rank " + std::to_string(rank) + " ended with status " + std::to_string(status));
    }
  }
}

std::string Read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The folders of this process's threads by their names.
std::multimap<std::string, std::string> ThreadsByName() {
  std::multimap<std::string, std::string> threads;
  DIR* folder = opendir("/proc/self/task");
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    const std::string path = std::string("/proc/self/task/") + entry->d_name;
    std::string name = Read(path + "/comm");
    name.resize(name.find('\n') == std::string::npos ? name.size() : name.find('\n'));
    threads.emplace(name, path);
  }
  closedir(folder);
  return threads;
}

// utime and stime, fields 14 and 15 of the file, in ticks.
int64_t TicksOf(const std::string& thread) {
  const std::string text = Read(thread + "/stat");
  int64_t ticks[2] = {0, 0};
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  fields >> ticks[0] >> ticks[1];
  return ticks[0] + ticks[1];
}

TEST(ChannelsSleepBetweenCallsTakeNoSignalsAndEnd) {
  RunWithChannels(1, 3, [](int, std::unique_ptr<ddl::HostMemory> memory) {
    const auto none = [](HostGroup*, int, int) { return Status(); };
    CHECK(memory->channels->Run(3 * kChannel, none).ok(), "");
    const auto threads = ThreadsByName();
    for (const char* name : {"ddl-channel-1", "ddl-channel-2"}) {
      CHECK(threads.count(name) == 1, name);
      const std::string path = threads.find(name)->second;
      const std::string status = Read(path + "/status");
      // All but SIGKILL, SIGSTOP, those of faults and the two that the C library keeps for itself.
      CHECK(status.find("SigBlk:\tfffffffe3ffbfa27") != std::string::npos, status);
      const int64_t before = TicksOf(path);
      usleep(200'000);
      CHECK(TicksOf(path) <= before + 1, "a thread that has nothing to do took time");
    }
    memory.reset();
    CHECK(ThreadsByName().count("ddl-channel-1") == 0, "it has ended");
  });
}

TEST(AChannelThatCannotBeginIsAnErrorAndLeavesNoThread) {
  constexpr int kChannels = 3;
  std::unique_ptr<char, void (*)(void*)> base(
      static_cast<char*>(std::aligned_alloc(4096, kChannels * HostGroup::Nbytes(1))), std::free);
  FormatChannels(base.get(), 1, kChannels);
  HostGroup first(base.get(), 0, 1, 60);
  static std::atomic<int> groups{0};
  allocation_fails = [](size_t nbytes) { return nbytes == sizeof(HostGroup) && ++groups == 2; };
  std::string said;
  try {
    HostChannels channels(
        &first, {base.get() + HostGroup::Nbytes(1), base.get() + 2 * HostGroup::Nbytes(1)});
  } catch (const std::exception& error) {
    said = error.what();
  }
  allocation_fails = nullptr;
  CHECK(groups == 2 && said.find("could not go on") != std::string::npos, said);
  CHECK(ThreadsByName().count("ddl-channel-1") == 0, "it has ended");
}

}  // namespace
