#ifndef DDL_BENCHMARKS_COLLECTIVES_OURS_H_
#define DDL_BENCHMARKS_COLLECTIVES_OURS_H_

#include <cstdint>

#include "comm/communicator.h"
#include "require.h"

// As the engine does it: agreement and sum in one round where the tensor is small and the ranks share
// memory, else one after the other.
inline void Ours(ddl::Communicator& group, const float* in, float* out, int64_t count) {
  ddl::Offer offer;
  offer.digest[0] = count;
  const bool small = group.SumsOffers() && count * 4 <= ddl::kMaxOfferBytes;
  if (small) {
    offer.in = in;
    offer.out = out;
    offer.count = count;
  }
  ddl::Met met = ddl::Met::kDifferent;
  Require(group.Meet(offer, &met));
  if (met != ddl::Met::kAlike) Die("ranks disagree");
  if (!small) Require(group.AllReduce(in, out, count, ddl::DType::kFloat32, 1));
}

#endif  // DDL_BENCHMARKS_COLLECTIVES_OURS_H_
