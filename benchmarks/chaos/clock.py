"""A wall clock that can jump for the processes of one run, by a preloaded library.

Linux has no namespace for the wall clock, and other programs use the machine's clock. Monotonic
clocks and the timestamps of files do not jump. libfaketime 0.9.10 cannot serve here: without a
jump of the monotonic clock it makes `time.sleep` of Python 3.11 fail with EINVAL, and with one
waits for events never end.
"""

import shutil
import struct
import subprocess
from pathlib import Path

COMPILE_S = 60.0
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *ahead; /* seconds, in a file that all processes map */

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("LONGSTRIDE_CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) ahead = page;
  close(file);
}
static long long jumped(void) { return ahead ? *ahead : 0; }

int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, at);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += jumped();
  return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  int failed = syscall(SYS_gettimeofday, at, zone);
  if (!failed && at) at->tv_sec += jumped();
  return failed;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
/* The kernel's clock has not jumped: it gets the times that it knows. Monotonic ones are small. */
static struct timespec known(const struct timespec *at) {
  struct timespec then = *at;
  if (then.tv_sec > 1000000000) then.tv_sec -= jumped();
  return then;
}
int pthread_cond_timedwait(pthread_cond_t *restrict changed, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict at) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec then = known(at);
  return real(changed, lock, &then);
}
int sem_timedwait(sem_t *restrict free, const struct timespec *restrict at) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec then = known(at);
  return real(free, &then);
}
"""


class JumpingClock:
    """The wall clock of processes that are started with `environment`.

    Example: clock = make_clock(folder); start(env=clock.environment); clock.set_ahead(3600)
    """

    def __init__(self, library: Path, ahead: Path) -> None:
        self._ahead = ahead
        self.environment = {"LD_PRELOAD": str(library), "LONGSTRIDE_CHAOS_CLOCK": str(ahead)}
        self.set_ahead(0)

    def set_ahead(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the machine's; negative: behind it."""
        # Processes have mapped the file, so it must not be truncated or replaced.
        mode = "r+b" if self._ahead.exists() else "wb"
        with self._ahead.open(mode, buffering=0) as file:
            file.write(struct.pack("=q", seconds))


def make_clock(folder: Path) -> JumpingClock | None:
    """Compile the library into a folder; return None if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source = folder / "clock.c"
    library = folder / "clock.so"
    source.write_text(SOURCE, encoding="utf-8")
    command = (compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl")
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
    return JumpingClock(library, folder / "clock.ahead")
