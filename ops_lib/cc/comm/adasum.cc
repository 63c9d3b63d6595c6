#include "comm/adasum.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "core/half.h"

// For the sums of products, which the compiler turns into vectors at this level only.
#pragma GCC optimize("O3")

namespace ddl {
namespace {

// Of two vectors a and b: a.b, a.a, b.b.
constexpr int kProducts = 3;

// Added up in lanes, which do not depend on the processor.
template <typename Number>
void AddProducts(const Number* a, const Number* b, int64_t count, double* products) {
  constexpr int kLanes = 8;
  double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = a[i + lane], y = b[i + lane];
      ab[lane] += x * y;
      aa[lane] += x * x;
      bb[lane] += y * y;
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) {
    const double x = a[i], y = b[i];
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    products[0] += ab[lane];
    products[1] += aa[lane];
    products[2] += bb[lane];
  }
}

double Coefficient(double product, double norm) {
  return norm == 0 ? 1.0 : 1.0 - product / (2 * norm);
}

// `mine` becomes what the two make together.
template <typename Number>
void Combine(Number* mine, const Number* theirs, int64_t count, double of_mine, double of_theirs) {
  for (int64_t i = 0; i < count; ++i) {
    mine[i] = static_cast<Number>(of_mine * mine[i] + of_theirs * theirs[i]);
  }
}

Range Intersection(const Range& one, const Range& other) {
  const int64_t begin = std::max(one.begin, other.begin);
  return {begin, std::max(begin, std::min(one.end, other.end))};
}

// The half of `whole` that a rank keeps in the step of that distance, or the other one.
Range HalfOf(const Range& whole, bool second) {
  const int64_t middle = whole.begin + whole.count() / 2;
  return second ? Range{middle, whole.end} : Range{whole.begin, middle};
}

// What a rank holds before the step of that distance.
Range PartOf(int rank, int64_t count, int distance) {
  Range part{0, count};
  for (int before = 1; before < distance; before *= 2) part = HalfOf(part, rank & before);
  return part;
}

template <typename Number>
Number* Room(std::vector<char>* memory, int64_t count) {
  const size_t nbytes = count * sizeof(Number);
  if (memory->size() < nbytes) memory->resize(nbytes);
  return reinterpret_cast<Number*>(memory->data());
}

}  // namespace

Status Adasum::Run(const std::vector<TensorSpan>& tensors, DType dtype) {
  const int size = communicator_->size();
  if ((size & (size - 1)) != 0) {
    return Status(Code::kInvalidInput, "Adasum goes pair by pair: the number of ranks has to be a "
                                       "power of two, and is " + std::to_string(size) + ".");
  }
  if (!IsHalf(dtype) && dtype != DType::kFloat32 && dtype != DType::kFloat64) {
    return Status(Code::kInvalidInput, std::string("Adasum is of floating-point tensors, not of ") +
                                           DTypeName(dtype) + ".");
  }
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  std::vector<TensorSpan> together;
  int64_t nbytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].count > 0) together.push_back(tensors[i]);
    nbytes += tensors[i].count * element;
    if (together.empty() || (i + 1 < tensors.size() && nbytes < together_)) continue;
    DDL_RETURN_IF_ERROR(dtype == DType::kFloat64 ? RunTogether<double>(together, dtype)
                                                 : RunTogether<float>(together, dtype));
    together.clear();
    nbytes = 0;
  }
  return Status();
}

template <typename Number>
Status Adasum::RunTogether(const std::vector<TensorSpan>& tensors, DType dtype) {
  const int rank = communicator_->rank(), size = communicator_->size();
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  std::vector<Range> places;  // of the tensors, one behind the other
  int64_t count = 0;
  for (const TensorSpan& tensor : tensors) {
    places.push_back({count, count + tensor.count});
    count += tensor.count;
  }
  Number* const mine = Room<Number>(&mine_, count);
  Number* const theirs = Room<Number>(&theirs_, (count + 1) / 2);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if constexpr (std::is_same_v<Number, float>) {
      if (IsHalf(dtype)) {
        Widen(tensors[i].in, mine + places[i].begin, tensors[i].count, dtype);
        continue;
      }
    }
    std::memcpy(mine + places[i].begin, tensors[i].in, tensors[i].count * element);
  }

  const int64_t of_tensors = kProducts * static_cast<int64_t>(tensors.size());
  for (int distance = 1; distance < size; distance *= 2) {
    const bool second = rank & distance;
    const Range whole = PartOf(rank, count, distance);
    const Range kept = HalfOf(whole, second), given = HalfOf(whole, !second);
    std::vector<int64_t> nbytes(static_cast<size_t>(size) * size, 0);
    for (int from = 0; from < size; ++from) {
      const Range half = HalfOf(PartOf(from, count, distance), !(from & distance));
      nbytes[from * size + (from ^ distance)] = half.count() * static_cast<int64_t>(sizeof(Number));
    }
    DDL_RETURN_IF_ERROR(
        communicator_->AllToAll(mine + given.begin, theirs, Exchange(rank, size, nbytes)));

    // Of each group that makes one vector of two.
    const int groups = size / (2 * distance), group = rank / (2 * distance);
    products_.assign(groups * of_tensors, 0.0);
    double* const products = products_.data() + group * of_tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Range part = Intersection(places[i], kept);
      const Number* a = mine + part.begin;
      const Number* b = theirs + (part.begin - kept.begin);
      if (part.count() == 0) continue;
      if (second) std::swap(a, b);
      AddProducts(a, b, part.count(), products + kProducts * i);
    }
    DDL_RETURN_IF_ERROR(communicator_->AllReduce(products_.data(), products_.data(),
                                                 groups * of_tensors, DType::kFloat64, 1));
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Range part = Intersection(places[i], kept);
      if (part.count() == 0) continue;
      const double* const of = products + kProducts * i;
      double coefficients[] = {Coefficient(of[0], of[1]), Coefficient(of[0], of[2])};
      if (second) std::swap(coefficients[0], coefficients[1]);
      Combine(mine + part.begin, theirs + (part.begin - kept.begin), part.count(), coefficients[0],
              coefficients[1]);
    }
  }

  const Range own = PartOf(rank, count, size);
  char* const gathered = Room<char>(&gathered_, (count + own.count()) * element);
  char* const rounded = gathered + count * element;
  if constexpr (std::is_same_v<Number, float>) {
    if (IsHalf(dtype)) Narrow(mine + own.begin, rounded, own.count(), dtype);
  }
  std::vector<int64_t> nbytes;
  for (int one = 0; one < size; ++one) nbytes.push_back(PartOf(one, count, size).count() * element);
  const void* const in = IsHalf(dtype) ? static_cast<const void*>(rounded) : mine + own.begin;
  DDL_RETURN_IF_ERROR(communicator_->AllGather(in, gathered, nbytes));
  const char* from = gathered;
  for (int one = 0; one < size; ++one) {
    const Range part = PartOf(one, count, size);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Range of_both = Intersection(places[i], part);
      if (of_both.count() == 0) continue;
      std::memcpy(static_cast<char*>(tensors[i].out) + (of_both.begin - places[i].begin) * element,
                  from + (of_both.begin - part.begin) * element, of_both.count() * element);
    }
    from += part.count() * element;
  }
  return Status();
}

}  // namespace ddl
