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
