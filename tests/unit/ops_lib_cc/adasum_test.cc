// Adasum on ranks of one host and of several: threads, with memory for each host and messages.

#include "comm/adasum.h"

#include <cmath>
#include <cstring>
#include <mutex>
#include <random>

#include "core/half.h"
#include "hosts.h"
#include "ranks.h"
#include "thread_communicator.h"
#include "values.h"

namespace {

using ddl::Adasum;
using ddl::Code;
using ddl::Communicator;
using ddl::DType;
using ddl::Status;

using Vector = std::vector<double>;

// The definition, in float64.
Vector Together(const Vector& a, const Vector& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  const double of_a = aa == 0 ? 1 : 1 - ab / (2 * aa), of_b = bb == 0 ? 1 : 1 - ab / (2 * bb);
  Vector both(a.size());
  for (size_t i = 0; i < a.size(); ++i) both[i] = of_a * a[i] + of_b * b[i];
  return both;
}

// Of all ranks: neighbours first.
Vector Expected(std::vector<Vector> ranks) {
  while (ranks.size() > 1) {
    std::vector<Vector> pairs;
    for (size_t i = 0; i < ranks.size(); i += 2) pairs.push_back(Together(ranks[i], ranks[i + 1]));
    ranks = pairs;
  }
  return ranks[0];
}

// Some parallel to each other, some not, and zeros on rank 1 or on all.
Vector VectorOf(int64_t count, int tensor, int rank) {
  std::mt19937 generator(static_cast<unsigned>(count * 31 + tensor * 7 + rank));
  std::normal_distribution<double> normal(0.2, 1.0);
  Vector values(count);
  for (double& value : values) value = normal(generator);
  if (tensor == 2) std::fill(values.begin(), values.end(), rank + 1.0);
  if ((tensor == 3 && rank == 1) || tensor == 4) std::fill(values.begin(), values.end(), 0.0);
  return values;
}

size_t SizeOf(DType dtype) { return ddl::DTypeSize(dtype); }

// As a tensor, and back. Halves hold what is written exactly where `values` has been read from one.
std::vector<char> Tensor(const Vector& values, DType dtype) {
  std::vector<char> bytes(values.size() * SizeOf(dtype));
  if (bytes.empty()) return bytes;
  const std::vector<float> floats(values.begin(), values.end());
  if (dtype == DType::kFloat64) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else if (dtype == DType::kFloat32) {
    std::memcpy(bytes.data(), floats.data(), bytes.size());
  } else {
    ddl::Narrow(floats.data(), bytes.data(), static_cast<int64_t>(values.size()), dtype);
  }
  return bytes;
}

Vector Values(const std::vector<char>& bytes, DType dtype) {
  const size_t count = bytes.size() / SizeOf(dtype);
  if (count == 0) return {};
  if (dtype == DType::kFloat64) {
    Vector values(count);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  std::vector<float> floats(count);
  if (dtype == DType::kFloat32) {
    std::memcpy(floats.data(), bytes.data(), bytes.size());
  } else {
    ddl::Widen(bytes.data(), floats.data(), static_cast<int64_t>(count), dtype);
  }
  return Vector(floats.begin(), floats.end());
}

// Several tensors at once, in place and not; every rank must have the definition's values, and the
// same bits as rank 0.
struct Job {
  std::vector<int64_t> counts;
  DType dtype;
  std::mutex mutex;
  std::vector<std::vector<char>> of_first;
};

void CheckRank(Communicator& group, Job& job, int64_t together = 1 << 20) {
  const int size = group.size();
  std::vector<std::vector<char>> ins, outs;
  std::vector<ddl::TensorSpan> tensors;
  for (size_t i = 0; i < job.counts.size(); ++i) {
    ins.push_back(Tensor(VectorOf(job.counts[i], static_cast<int>(i), group.rank()), job.dtype));
    outs.emplace_back(ins.back().size());
  }
  for (size_t i = 0; i < job.counts.size(); ++i) {
    char* const out = i % 2 == 0 ? outs[i].data() : ins[i].data();
    tensors.push_back({ins[i].data(), out, job.counts[i]});
  }
  Adasum adasum(&group, together);
  const Status status = adasum.Run(tensors, job.dtype);
  CHECK(status.ok(), status.message());
  const double tolerance = job.dtype == DType::kFloat64    ? 1e-12
                           : job.dtype == DType::kFloat32  ? 1e-5
                           : job.dtype == DType::kFloat16  ? 1e-3
                                                           : 8e-3;
  std::vector<std::vector<char>> results;
  for (size_t i = 0; i < job.counts.size(); ++i) {
    results.push_back(i % 2 == 0 ? outs[i] : ins[i]);
    std::vector<Vector> all;
    for (int rank = 0; rank < size; ++rank) {
      const Vector exact = VectorOf(job.counts[i], static_cast<int>(i), rank);
      all.push_back(Values(Tensor(exact, job.dtype), job.dtype));
    }
    const Vector expected = Expected(all), got = Values(results.back(), job.dtype);
    for (size_t at = 0; at < got.size(); ++at) {
      CHECK(std::abs(got[at] - expected[at]) <= tolerance * std::max(1.0, std::abs(expected[at])),
            std::to_string(size) + " ranks, " + ddl::DTypeName(job.dtype) + ", tensor " +
                std::to_string(i) + "[" + std::to_string(at) + "] is " + std::to_string(got[at]) +
                ", not " + std::to_string(expected[at]));
    }
  }
  const std::lock_guard<std::mutex> lock(job.mutex);
  if (job.of_first.empty()) job.of_first = results;
  CHECK(job.of_first == results, "other bits on rank " + std::to_string(group.rank()));
}

constexpr DType kFloating[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16,
                               DType::kBfloat16};
// Odd ones, which are cut anywhere; fewer elements than ranks; none.
const std::vector<std::vector<int64_t>> kCounts = {{1}, {3, 2}, {1000, 0, 7, 33, 5, 4097}};

TEST(AdasumOnOneHostIsAsDefined) {
  for (const int size : {1, 2, 4, 8}) {
    for (const DType dtype : kFloating) {
      for (const std::vector<int64_t>& counts : kCounts) {
        Job job{counts, dtype, {}, {}};
        RunThreads(size, [&job](ddl::HostGroup& group) {
          ThreadCommunicator communicator(&group);
          CheckRank(communicator, job);
        });
      }
    }
  }
}

TEST(AdasumOverHostsIsAsDefined) {
  const std::vector<std::vector<int>> jobs = {{1, 1}, {2, 2}, {3, 1}, {1, 4, 3}};
  for (const std::vector<int>& ranks_on : jobs) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      Job job{kCounts.back(), dtype, {}, {}};
      RunOnHosts(ranks_on, [&job](Communicator& group) { CheckRank(group, job); });
    }
  }
}

// Of one tensor alone, of two, of the rest; and one that is larger than a piece of shared memory.
TEST(AdasumInSeveralGoesIsAsDefined) {
  Job job{{5000, 0, 300, 4000, 3, 100'001}, DType::kFloat64, {}, {}};
  RunThreads(4, [&job](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group);
    CheckRank(communicator, job, 20'000);
  });
}

TEST(AdasumRefusesOtherNumbersOfRanksAndIntegersAndTheGroupGoesOn) {
  for (const int size : {3, 6}) {
    RunThreads(size, [size](ddl::HostGroup& group) {
      ThreadCommunicator communicator(&group);
      float value = 1;
      const Status status =
          Adasum(&communicator).Run({{&value, &value, 1}}, DType::kFloat32);
      CHECK(status.code() == Code::kInvalidInput, status.message());
      CHECK(status.message().find("power of two, and is " + std::to_string(size)) !=
                std::string::npos,
            status.message());
      const Status sum = communicator.AllReduce(&value, &value, 1, DType::kFloat32, 1);
      CHECK(sum.ok() && value == static_cast<float>(size), sum.message());
    });
  }
  RunThreads(2, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group);
    int64_t value = 1;
    const Status status = Adasum(&communicator).Run({{&value, &value, 1}}, DType::kInt64);
    CHECK(status.message().find("not of int64") != std::string::npos, status.message());
  });
}

// What one rank alone has lost stays visible everywhere.
TEST(AdasumOfNanIsNanOnEveryRank) {
  RunThreads(4, [](ddl::HostGroup& group) {
    ThreadCommunicator communicator(&group);
    std::vector<float> values(9, 1.0f), others(9, 1.0f);
    if (group.rank() == 2) values[5] = NAN;
    const Status status =
        Adasum(&communicator)
            .Run({{values.data(), values.data(), 9}, {others.data(), others.data(), 9}},
                 DType::kFloat32);
    CHECK(status.ok(), status.message());
    for (const float value : values) CHECK(std::isnan(value), std::to_string(value));
    for (const float value : others) CHECK(value == 1.0f, std::to_string(value));
  });
}

}  // namespace
