#ifndef DDL_TRANSPORT_SHARED_SEGMENT_H_
#define DDL_TRANSPORT_SHARED_SEGMENT_H_

#include <cstdint>

#include "core/status.h"

namespace ddl {

// Memory that the processes of one host share.
//
// It has no name in any file system: one process makes a memfd, the others open it through /proc
// while it is alive. So there is no moment at which a SIGKILL could leave something behind: the
// kernel frees the memory with the last process that has it mapped. Nor does the size of /dev/shm,
// 64 MiB in many containers, limit it.
class SharedSegment {
 public:
  // How another process of this host finds the memory.
  struct Address {
    int64_t pid = 0;
    int64_t file = -1;
    int64_t nbytes = 0;
    uint64_t cookie = 0;  // the first bytes; tells it from memory of another job
  };

  SharedSegment() = default;
  SharedSegment(const SharedSegment&) = delete;
  ~SharedSegment();

  // Makes and maps `nbytes` zero bytes and says in `address` where they are. Internal if the host
  // has not that much memory.
  Status Create(int64_t nbytes, Address* address);

  // Maps what another process has made. Internal if it cannot be reached, for one from within
  // another container.
  Status Attach(const Address& address);

  // All have attached: from now on nobody else can.
  void Seal();

  // Aligned to a page. The first kHeaderBytes are the segment's own and not counted here.
  void* base() const;

  static constexpr int64_t kHeaderBytes = 4096;

 private:
  Status Map(int64_t nbytes);

  char* memory_ = nullptr;
  int64_t nbytes_ = 0;
  int file_ = -1;
};

}  // namespace ddl

#endif  // DDL_TRANSPORT_SHARED_SEGMENT_H_
