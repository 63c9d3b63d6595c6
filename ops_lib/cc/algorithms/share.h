#ifndef DDL_ALGORITHMS_SHARE_H_
#define DDL_ALGORITHMS_SHARE_H_

#include <cstdint>

namespace ddl {

// Elements, or bytes, from `begin` up to `end`.
struct Share {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
};

// One of `shares` nearly equal parts of `count`.
inline Share ShareOf(int64_t count, int shares, int share) {
  const int64_t each = count / shares, rest = count % shares;
  const auto begin = [&](int64_t i) { return i * each + (i < rest ? i : rest); };
  return {begin(share), begin(share + 1)};
}

}  // namespace ddl

#endif  // DDL_ALGORITHMS_SHARE_H_
