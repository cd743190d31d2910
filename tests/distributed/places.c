/* Tensors' memory on CPU, at places as CUDA's caching allocator finds them: best fit, in segments of 2 and 20 MiB, and
   neighbours that are free become one. To be loaded before the C library; select_places() chooses one of two pools. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#define ARENA ((size_t)4 << 30)
#define GRAIN ((size_t)512)
#define MIB ((size_t)1 << 20)

typedef struct Block {
  char *at;
  size_t size;
  int list;
  int is_free;
  struct Block *left, *right;       /* in memory */
  struct Block *previous, *next;    /* among what is free */
} Block;

static char *arena;
static size_t used;
static Block **block_at;
static Block *blocks;
static size_t made;
static Block *spare;
static Block *lists[4]; /* small and large ones of each pool */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int pool;

void select_places(int which) { pool = which; }

static void *reserve(size_t size) {
  return mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static Block *new_block(void) {
  Block *block = spare;
  if (block)
    spare = block->next;
  else
    block = &blocks[made++];
  memset(block, 0, sizeof *block);
  return block;
}

static void list_it(Block *block) {
  block->is_free = 1;
  block->previous = NULL;
  block->next = lists[block->list];
  if (block->next) block->next->previous = block;
  lists[block->list] = block;
}

static void unlist(Block *block) {
  block->is_free = 0;
  if (block->previous)
    block->previous->next = block->next;
  else
    lists[block->list] = block->next;
  if (block->next) block->next->previous = block->previous;
}

static Block *best_fit(size_t size, int list) {
  Block *best = NULL;
  for (Block *block = lists[list]; block; block = block->next) {
    if (block->size < size) continue;
    if (!best || block->size < best->size || (block->size == best->size && block->at < best->at)) best = block;
  }
  return best;
}

static Block *segment(size_t size, int large, int list) {
  size_t whole = !large ? 2 * MIB : size < 10 * MIB ? 20 * MIB : (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  if (used + whole > ARENA) return NULL;
  Block *block = new_block();
  block->at = arena + used;
  block->size = whole;
  block->list = list;
  used += whole;
  list_it(block);
  return block;
}

static void *take(size_t size) {
  size = size ? (size + GRAIN - 1) / GRAIN * GRAIN : GRAIN;
  int large = size > MIB, list = large + 2 * pool;
  Block *block = best_fit(size, list);
  if (!block) block = segment(size, large, list);
  if (!block) return NULL;
  unlist(block);
  size_t left = block->size - size;
  if (large ? left > MIB : left >= GRAIN) {
    Block *rest = new_block();
    rest->at = block->at + size;
    rest->size = left;
    rest->list = list;
    rest->left = block;
    rest->right = block->right;
    if (rest->right) rest->right->left = rest;
    block->right = rest;
    block->size = size;
    list_it(rest);
  }
  block_at[(size_t)(block->at - arena) / GRAIN] = block;
  return block->at;
}

static Block *joined(Block *block, Block *other) {
  block->size += other->size;
  block->right = other->right;
  if (block->right) block->right->left = block;
  other->next = spare;
  spare = other;
  return block;
}

static void give_back(Block *block) {
  block_at[(size_t)(block->at - arena) / GRAIN] = NULL;
  if (block->right && block->right->is_free) {
    unlist(block->right);
    joined(block, block->right);
  }
  if (block->left && block->left->is_free) {
    unlist(block->left);
    block = joined(block->left, block);
  }
  list_it(block);
}

static int is_ours(void *at) { return arena && (char *)at >= arena && (char *)at < arena + ARENA; }

int posix_memalign(void **at, size_t alignment, size_t size) {
  if (alignment > GRAIN) {
    void *(*aligned)(size_t, size_t) = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "memalign");
    *at = aligned(alignment, size);
    return *at ? 0 : ENOMEM;
  }
  pthread_mutex_lock(&lock);
  if (!arena) {
    block_at = reserve(ARENA / GRAIN * sizeof *block_at);
    blocks = reserve(ARENA / GRAIN * sizeof *blocks);
    arena = reserve(ARENA);
  }
  *at = take(size);
  pthread_mutex_unlock(&lock);
  return *at ? 0 : ENOMEM;
}

void free(void *at) {
  static void (*others)(void *);
  if (is_ours(at)) {
    pthread_mutex_lock(&lock);
    give_back(block_at[(size_t)((char *)at - arena) / GRAIN]);
    pthread_mutex_unlock(&lock);
    return;
  }
  if (!others) others = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  others(at);
}

size_t malloc_usable_size(void *at) {
  static size_t (*others)(void *);
  if (is_ours(at)) return block_at[(size_t)((char *)at - arena) / GRAIN]->size;
  if (!others) others = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
  return others(at);
}
