/* The C API of the runtime: problem in, prepared operator out, launches that allocate nothing.
 *
 *   wyvern_runtime* runtime;     wyvern_runtime_create(NULL, &runtime);
 *   wyvern_device* device;       wyvern_device_open("cuda:0", &device);
 *   wyvern_problem* problem;     wyvern_problem_create("gated_delta_rule", &problem);
 *   wyvern_problem_set_int(problem, "T", 8192);
 *   wyvern_operator* op;         wyvern_prepare(runtime, device, problem, NULL, &op);
 *   wyvern_launch launch = WYVERN_LAUNCH_INIT;
 *   launch.tensors = tensors;    launch.tensor_count = 6;
 *   wyvern_operator_launch(op, &launch);
 *
 * C11 and C++ compile it. What a problem means, and each tensor's shape and content, is said once,
 * in <wyvern/problem.hpp> (Problem) and <wyvern/runtime.hpp> (Arguments): fields and tensors go
 * here by the names they have there, so that a new one needs no new function.
 *
 * Errors. A function that can fail returns a wyvern_status; after any but WYVERN_OK
 * wyvern_last_error() has one sentence that names the argument, its value and what is legal, and
 * what the function gives through pointers is not written, but for handles, which are NULL. No C++
 * exception leaves the library. A null pointer where none is allowed is WYVERN_BAD_INPUT; a pointer
 * to something else, or to a handle that was destroyed, is undefined.
 *
 * Ownership. What a function creates the caller destroys with the function of that name, which
 * takes NULL too. Handles may be destroyed in any order: an operator keeps what it needs of its
 * runtime and device, memory its device. Destroying an operator or memory does not wait for a GPU:
 * work that uses it must be done. Text that goes in is NUL-terminated UTF-8 and copied. Text that
 * comes out is never NULL; its function says how long it lives.
 *
 * Threads. Every handle but a wyvern_problem may be used by several threads at once; a problem only
 * while none of them changes it. No thread may still use a handle that another destroys.
 *
 * Versions. Functions and values of enumerations are added and never taken away or changed, so that
 * a program works with every library whose wyvern_api_version() is at least the
 * WYVERN_API_VERSION it was compiled with. Structs grow at their end. A struct says its size as the
 * caller knows it: what an older caller does not have counts as 0, what is beyond the library's own
 * struct must be 0 (WYVERN_BAD_INPUT: a newer caller asks for something that this library has not)
 * where the library reads, and becomes 0 where it writes. So initialize structs to zeros, or with
 * the macro beside them. */
#ifndef WYVERN_WYVERN_H
#define WYVERN_WYVERN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WYVERN_C_API __attribute__((visibility("default")))

/* ---- Versions and errors ---- */

#define WYVERN_API_VERSION 2

/* The WYVERN_API_VERSION of the library that runs. Never fails. */
WYVERN_C_API int wyvern_api_version(void);
/* The library's own version: "MAJOR.MINOR.PATCH". Lives forever. Never fails. */
WYVERN_C_API const char* wyvern_version(void);

typedef enum wyvern_status {
  WYVERN_OK = 0,
  WYVERN_BAD_INPUT = 1,     /* an argument is wrong: which one, its value, what is legal */
  WYVERN_UNAVAILABLE = 2,   /* a device, driver or compiler is missing or failed: what to do */
  WYVERN_COMPILE_ERROR = 3, /* a kernel did not compile: with the compiler's own message */
  WYVERN_IO_ERROR = 4,      /* a file could not be read or written */
  WYVERN_OUT_OF_MEMORY = 5, /* of the host */
  WYVERN_INTERNAL_ERROR = 6 /* a defect of the library */
} wyvern_status;

/* The message of this thread's last call that failed; "" before the first. Calls that succeed leave
 * it. Owned by the library, valid until the thread's next call that fails. Never fails. */
WYVERN_C_API const char* wyvern_last_error(void);

/* ---- Devices ---- */

typedef struct wyvern_device wyvern_device;           /* an open device */
typedef struct wyvern_device_list wyvern_device_list; /* what there was when it was made */
typedef struct wyvern_memory wyvern_memory;           /* memory on a device */

typedef struct wyvern_device_info {
  size_t struct_size;
  const char* name;    /* "cpu", "cuda:0" */
  const char* kind;    /* "cpu", "cuda" */
  const char* model;   /* "NVIDIA H200", or the processor's name */
  const char* arch;    /* "sm_90a"; of the CPU vendor, family and model */
  const char* key;     /* what measurements are kept under */
  const char* driver;  /* CUDA's version and the driver's; the CPU's target name */
  const char* problem; /* empty when usable, else what is wrong and how to fix it */
  int64_t units;       /* multiprocessors, or threads used */
  int64_t memory_bytes;
  double clock_ghz;
  double peak_bytes_per_s; /* of device memory; 0: unknown */
} wyvern_device_info;

/* All zeros but the size. The same for each struct below. */
#define WYVERN_DEVICE_INFO_INIT {sizeof(wyvern_device_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* "cpu" or "cuda:N". On a GPU the device's primary context is used, that of the CUDA runtime.
 * WYVERN_BAD_INPUT for another spelling, WYVERN_UNAVAILABLE where the device or its driver is
 * missing. Opening a device again gives another handle to the same. */
WYVERN_C_API wyvern_status wyvern_device_open(const char* name, wyvern_device** device);
/* The first GPU that can be used, else the CPU. */
WYVERN_C_API wyvern_status wyvern_device_open_best(wyvern_device** device);
WYVERN_C_API void wyvern_device_destroy(wyvern_device* device);
/* The texts live as long as the handle. */
WYVERN_C_API wyvern_status wyvern_device_get_info(const wyvern_device* device,
                                                  wyvern_device_info* info);

/* Every device of the machine, the CPU first, those that cannot be used with their problem. */
WYVERN_C_API wyvern_status wyvern_device_list_create(wyvern_device_list** list);
WYVERN_C_API void wyvern_device_list_destroy(wyvern_device_list* list);
/* 0 for NULL. */
WYVERN_C_API size_t wyvern_device_list_count(const wyvern_device_list* list);
/* `index` is below the count. The texts live as long as the list. */
WYVERN_C_API wyvern_status wyvern_device_list_get(const wyvern_device_list* list, size_t index,
                                                  wyvern_device_info* info);

/* Uninitialized memory on the device, aligned to 256 bytes, for callers that have no allocator of
 * their own. WYVERN_UNAVAILABLE where there is too little. */
WYVERN_C_API wyvern_status wyvern_memory_create(const wyvern_device* device, size_t bytes,
                                                wyvern_memory** memory);
WYVERN_C_API void wyvern_memory_destroy(wyvern_memory* memory);
/* The address on the device, as long as the handle lives; NULL for NULL. */
WYVERN_C_API void* wyvern_memory_data(const wyvern_memory* memory);

/* Copy `bytes` between host memory and the device's, and wait until it is done, but for no stream
 * that was made not to wait for the default one: wyvern_device_synchronize() it first. */
WYVERN_C_API wyvern_status wyvern_device_copy_in(const wyvern_device* device, void* to,
                                                 const void* from_host, size_t bytes);
WYVERN_C_API wyvern_status wyvern_device_copy_out(const wyvern_device* device, void* to_host,
                                                  const void* from, size_t bytes);
/* Sets every byte to `byte`, ordered after `stream`, a CUstream (NULL: the default stream). Streams
 * mean nothing to the CPU, where every call is done when it returns. */
WYVERN_C_API wyvern_status wyvern_device_fill(const wyvern_device* device, void* to,
                                              unsigned char byte, size_t bytes, void* stream);
/* Waits for all work of the stream. WYVERN_UNAVAILABLE where the device reports a fault. */
WYVERN_C_API wyvern_status wyvern_device_synchronize(const wyvern_device* device, void* stream);

/* ---- Problems ---- */

/* Element types of tensors. 0 is none of them, so that one that was forgotten is noticed. */
typedef enum wyvern_dtype {
  WYVERN_FP32 = 1,
  WYVERN_FP16 = 2,
  WYVERN_BF16 = 3,
  WYVERN_INT32 = 4,
  WYVERN_INT64 = 5,
  WYVERN_BOOLEAN = 6,     /* a byte, 0 or 1 */
  WYVERN_FLOAT8_E4M3 = 7, /* OCP: no infinities, 448 the largest number */
  WYVERN_FLOAT8_E5M2 = 8
} wyvern_dtype;

/* What to compute: an operator, a pass, a shape, dtypes, options. */
typedef struct wyvern_problem wyvern_problem;

typedef enum wyvern_field_type {
  WYVERN_FIELD_TEXT = 1, /* wyvern_problem_set_text(): a name ("forward", "bf16", "tf32x3") */
  WYVERN_FIELD_INT = 2,  /* wyvern_problem_set_int() */
  WYVERN_FIELD_BOOL = 3, /* wyvern_problem_set_int(): 0 or 1 */
  WYVERN_FIELD_REAL = 4  /* wyvern_problem_set_real() */
} wyvern_field_type;

/* A field of a problem. The texts live forever. */
typedef struct wyvern_field_info {
  size_t struct_size;
  const char* name;
  const char* help;     /* one line */
  const char* scope;    /* where it means something: "kda only"; empty: everywhere */
  const char* value;    /* its default as text; empty: unset */
  int32_t type;         /* a wyvern_field_type */
  int32_t may_be_unset; /* 1: wyvern_problem_unset() takes it */
} wyvern_field_info;

#define WYVERN_FIELD_INFO_INIT {sizeof(wyvern_field_info), 0, 0, 0, 0, 0, 0}

/* How many fields a problem has in this library. */
WYVERN_C_API size_t wyvern_field_count(void);
/* `index` is below the count; a field's index may be another in another version. */
WYVERN_C_API wyvern_status wyvern_field_get(size_t index, wyvern_field_info* info);

/* How many operators this library has, and their names, which live forever; NULL for an index that
 * is not below the count. */
WYVERN_C_API size_t wyvern_operator_name_count(void);
WYVERN_C_API const char* wyvern_operator_name(size_t index);

/* A problem of the operator, all other fields at their defaults. */
WYVERN_C_API wyvern_status wyvern_problem_create(const char* op, wyvern_problem** problem);
WYVERN_C_API wyvern_status wyvern_problem_copy(const wyvern_problem* from,
                                               wyvern_problem** problem);
WYVERN_C_API void wyvern_problem_destroy(wyvern_problem* problem);

/* Set a field by its name. WYVERN_BAD_INPUT for a name that is no field's, a field of another type,
 * and a text that is none of the field's names; whether values are legal together
 * wyvern_problem_validate() says, and whatever takes a problem after it. */
WYVERN_C_API wyvern_status wyvern_problem_set_int(wyvern_problem* problem, const char* field,
                                                  int64_t value);
WYVERN_C_API wyvern_status wyvern_problem_set_real(wyvern_problem* problem, const char* field,
                                                   double value);
WYVERN_C_API wyvern_status wyvern_problem_set_text(wyvern_problem* problem, const char* field,
                                                   const char* value);
/* As if the field had never been set: its default is chosen by the rest of the problem. */
WYVERN_C_API wyvern_status wyvern_problem_unset(wyvern_problem* problem, const char* field);
/* A field of any type as text: "8192", "true", "bf16"; empty where it is unset. Writes up to
 * `capacity` bytes with the NUL (`text` may be NULL where that is 0) and the length without it to
 * `length`, which may be NULL; a text that does not fit is cut. */
WYVERN_C_API wyvern_status wyvern_problem_get_text(const wyvern_problem* problem, const char* field,
                                                   char* text, size_t capacity, size_t* length);

/* Whether the problem is legal; else WYVERN_BAD_INPUT with the first wrong field. */
WYVERN_C_API wyvern_status wyvern_problem_validate(const wyvern_problem* problem);
/* The key under which the problem's tuned plans are kept, written as wyvern_problem_get_text()
 * does. The problem must be legal. */
WYVERN_C_API wyvern_status wyvern_problem_key(const wyvern_problem* problem, char* text,
                                              size_t capacity, size_t* length);

/* ---- Tensors ---- */

#define WYVERN_MAX_RANK 8

typedef enum wyvern_access {
  WYVERN_READ = 1,      /* an input */
  WYVERN_WRITE = 2,     /* an output: every element is written */
  WYVERN_READ_WRITE = 3 /* updated in place */
} wyvern_access;

/* What a tensor of a launch must be. */
typedef struct wyvern_tensor_spec {
  const char* name; /* lives forever */
  int32_t present;  /* 1: the problem asks for it; 0: it must be left out, all below is 0 */
  int32_t access;   /* a wyvern_access */
  int32_t dtype;    /* a wyvern_dtype */
  int32_t rank;
  int64_t shape[WYVERN_MAX_RANK]; /* elements; 0 beyond the rank */
  size_t bytes;                   /* of the contiguous tensor */
  /* Version 2. 1: the operator's plan takes it strided, as wyvern_tensor says; 0: it must be
   * contiguous. 0 of wyvern_problem_tensors(), as plans differ. */
  int64_t strided;
} wyvern_tensor_spec;

/* Every tensor that an operator can have, those of a legal problem with `present`: what a launch
 * takes and how large it must be, for which no device is needed. Writes the first `capacity` of
 * them, each `spec_size` bytes, sizeof(wyvern_tensor_spec), after the other (`specs` may be NULL
 * where capacity is 0) and how many there are to `count`, which may be NULL. The order is that of
 * wyvern_operator_tensors() and may be another in another version: go by names. */
WYVERN_C_API wyvern_status wyvern_problem_tensors(const wyvern_problem* problem,
                                                  wyvern_tensor_spec* specs, size_t spec_size,
                                                  size_t capacity, size_t* count);

/* ---- The runtime ---- */

/* Finds plans, compiles, loads, and keeps each loaded kernel for its own lifetime; one for a
 * process is enough. fork(): the child may go on with it on the CPU; what a GPU's driver holds, no
 * child can use. */
typedef struct wyvern_runtime wyvern_runtime;

typedef struct wyvern_runtime_options {
  size_t struct_size;
  /* The folder of the cache of compiled kernels and tuned plans; NULL: the user's own
   * ($WYVERN_CACHE_DIR, else $XDG_CACHE_HOME/wyvern, else ~/.cache/wyvern). One that cannot be used
   * is no error: kernels are then compiled in each process. */
  const char* cache_directory;
  /* Threads that compile one plan's kernels; 0: one per core. */
  uint64_t compile_jobs;
  /* Called with one sentence from the thread that met it, when a tuned plan cannot be used and the
   * default plan takes its place, when the cache works no longer or only in part, and when a policy
   * wanted a problem tuned and it was not; NULL: a line on stderr. The sentence lives until it
   * returns. It must neither throw nor call wyvern_ functions on this runtime; `user` is passed on
   * and must be valid while the runtime lives. */
  void (*on_degraded)(const char* sentence, void* user);
  void* user;
  /* Version 2. The program `wyvern`, which tunes where a policy wants that, as a path or a name on
   * PATH; NULL: the one installed with this library, else `wyvern` on PATH. */
  const char* command;
} wyvern_runtime_options;

#define WYVERN_RUNTIME_OPTIONS_INIT {sizeof(wyvern_runtime_options), 0, 0, 0, 0, 0}

/* `options` may be NULL: all zeros. */
WYVERN_C_API wyvern_status wyvern_runtime_create(const wyvern_runtime_options* options,
                                                 wyvern_runtime** runtime);
WYVERN_C_API void wyvern_runtime_destroy(wyvern_runtime* runtime);
/* How many kernels this runtime compiled (found neither loaded nor in the cache); 0 for NULL. */
WYVERN_C_API int64_t wyvern_runtime_compiled(const wyvern_runtime* runtime);

/* Where an operator's plan may come from. _ON_MISS and _BACKGROUND (version 2) have a problem
 * tuned, by the program `wyvern` in a process of its own: each problem key once at most on a device
 * in the life of a runtime, several one after the other, also where that fails. A child of fork()
 * leaves to its parent what that has begun. */
typedef enum wyvern_policy {
  WYVERN_POLICY_CACHED = 0,  /* tuned plans of the cache, else the default plan */
  WYVERN_POLICY_OFF = 1,     /* the default plan */
  WYVERN_POLICY_ON_MISS = 2, /* a problem that was not tuned is tuned first: wyvern_prepare() takes
                                the budget longer; the program's progress goes to stderr, and ^C
                                ends it with what was measured kept */
  WYVERN_POLICY_BACKGROUND = 3, /* the best plan known, and a problem that was not tuned is tuned
                                  meanwhile, with some of the machine's time:
                                  wyvern_operator_is_outdated() says when to prepare it again */
  WYVERN_POLICY_FIXED = 4 /* the best plan of packs, else the default plan, whatever was tuned on
                             this machine: equal packs and devices give equal plans */
} wyvern_policy;

typedef struct wyvern_prepare_options {
  size_t struct_size;
  int64_t policy;   /* a wyvern_policy */
  const char* plan; /* not NULL: this plan, as wyvern_operator_plan() writes it; policy is 0 then */
  /* Version 2. Seconds that a tuning which the policy begins may take; 0: 60. */
  double tuning_budget_s;
} wyvern_prepare_options;

#define WYVERN_PREPARE_OPTIONS_INIT {sizeof(wyvern_prepare_options), 0, 0, 0}

/* A prepared operator: compiled, loaded, ready. Never changes. */
typedef struct wyvern_operator wyvern_operator;

/* The operator for the problem, of which it keeps a copy. Compiles what the cache does not hold:
 * milliseconds to seconds the first time, microseconds when all is loaded, whatever other threads
 * compile meanwhile. Not to be called while a CUDA graph is captured. `options` may be NULL: all
 * zeros. WYVERN_BAD_INPUT for an illegal problem and for a plan that does not carry it out,
 * WYVERN_UNAVAILABLE where a compiler is missing or nothing fits the device. */
WYVERN_C_API wyvern_status wyvern_prepare(wyvern_runtime* runtime, const wyvern_device* device,
                                          const wyvern_problem* problem,
                                          const wyvern_prepare_options* options,
                                          wyvern_operator** op);
WYVERN_C_API void wyvern_operator_destroy(wyvern_operator* op);

/* Version 2. 1 where the operator was prepared with WYVERN_POLICY_BACKGROUND and its problem has
 * been tuned since, so that wyvern_prepare() gives a better one, in milliseconds; else, and for
 * NULL, 0. The operator goes on working, inside a captured graph too. Takes no lock and reads one
 * number, so it may be asked before each launch. */
WYVERN_C_API int wyvern_operator_is_outdated(const wyvern_operator* op);
/* Version 2. Waits until nothing is left to tune in the background, but no longer than `seconds`
 * (0: not at all; infinity: as long as it takes), and writes how many problems are to `left`, which
 * may be NULL. */
WYVERN_C_API wyvern_status wyvern_runtime_wait_for_tuning(wyvern_runtime* runtime, double seconds,
                                                          size_t* left);
/* Version 2. Ends what is being tuned, within some seconds, and has the runtime tune nothing from
 * now on: for the end of a program that does not destroy its runtime, which does the same. What was
 * measured is kept. */
WYVERN_C_API wyvern_status wyvern_runtime_stop_tuning(wyvern_runtime* runtime);

/* Bytes of memory on the device that a launch needs beside its tensors. */
WYVERN_C_API wyvern_status wyvern_operator_workspace_bytes(const wyvern_operator* op,
                                                           size_t* bytes);

typedef enum wyvern_origin {
  WYVERN_ORIGIN_EXACT = 1,   /* the plan tuned for this problem key */
  WYVERN_ORIGIN_NEAREST = 2, /* that of the nearest problem whose plan can serve: with other counts
                                of tokens or sequences, heads or options; or of another driver */
  WYVERN_ORIGIN_DEFAULT = 3, /* nothing tuned */
  WYVERN_ORIGIN_GIVEN = 4    /* wyvern_prepare_options.plan */
} wyvern_origin;

/* Where the plan came from: a wyvern_origin. */
WYVERN_C_API wyvern_status wyvern_operator_origin(const wyvern_operator* op, int32_t* origin);
/* The plan as JSON, [{"template": id, "config": "BT=64,..."}...], its kernels in order. Lives as
 * long as the operator. */
WYVERN_C_API wyvern_status wyvern_operator_plan(const wyvern_operator* op, const char** json);
/* The operator's tensors, as wyvern_problem_tensors() does. */
WYVERN_C_API wyvern_status wyvern_operator_tensors(const wyvern_operator* op,
                                                   wyvern_tensor_spec* specs, size_t spec_size,
                                                   size_t capacity, size_t* count);

/* A tensor of a launch. */
typedef struct wyvern_tensor {
  const char* name; /* as in wyvern_tensor_spec */
  void* data; /* on the operator's device, aligned to 16 bytes; NULL: there is no such tensor, or
                 it has no elements */
  const int64_t* shape;   /* `rank` extents; NULL where rank is 0 */
  const int64_t* strides; /* in elements; NULL: contiguous (row-major; a dimension of extent 1 may
                             have any stride). Where `strided` of its wyvern_tensor_spec is 1
                             (version 2), a tensor [B, T, ...] may have rows of tokens at equal
                             distances of a multiple of 16 bytes below 2^40, each row contiguous,
                             sequences of a batch at T distances. A launch neither reads nor writes
                             between rows, but counts these bytes as memory of a tensor that it
                             writes. Slots of a pool [slots, ...] may be strided likewise */
  int32_t dtype;          /* a wyvern_dtype */
  int32_t rank;
} wyvern_tensor;

/* Version 2. 1 in `takes` where a launch of the operator takes this tensor as it is, by its name,
 * dtype, shape, strides and address; else 0. `tensor_size`: sizeof(wyvern_tensor). */
WYVERN_C_API wyvern_status wyvern_operator_takes(const wyvern_operator* op,
                                                 const wyvern_tensor* tensor, size_t tensor_size,
                                                 int32_t* takes);

typedef struct wyvern_launch {
  size_t struct_size;
  size_t tensor_size; /* sizeof(wyvern_tensor), bytes from one to the next */
  /* Each tensor of the operator that is present, once, in any order; that of
   * wyvern_operator_tensors() is found fastest. */
  const wyvern_tensor* tensors;
  size_t tensor_count;
  /* Memory on the device, aligned to 256 bytes, at least wyvern_operator_workspace_bytes(), which
   * no launch in flight uses. Its content does not matter. NULL where 0 bytes are needed. */
  void* workspace;
  size_t workspace_bytes;
  void* stream; /* a CUstream of the operator's device; NULL: the default stream */
  /* Optional copy of cu_seqlens on the host, N + 1 entries, checked in full before the launch.
   * Without it a bad one on a GPU is clamped into [0, T] there. */
  const int64_t* cu_seqlens_host;
  size_t cu_seqlens_host_count;
} wyvern_launch;

#define WYVERN_LAUNCH_INIT {sizeof(wyvern_launch), sizeof(wyvern_tensor), 0, 0, 0, 0, 0, 0, 0}

/* Enqueues the pass on the stream (runs it, on the CPU). Allocates nothing, takes no lock,
 * synchronizes nothing; legal inside CUDA graph capture. Tensors stay valid until the work is done;
 * the structs and what they point to only until this returns. What is written (outputs, a state
 * updated in place) shares memory with nothing else of the launch. Before anything is launched
 * WYVERN_BAD_INPUT names a tensor that is missing, unknown, given twice or wrong, a workspace that
 * is too small or not aligned, or two tensors that share memory; WYVERN_UNAVAILABLE where the
 * driver refuses. That pointers lead to memory of the device, as large as the shapes say, is the
 * caller's promise. */
WYVERN_C_API wyvern_status wyvern_operator_launch(const wyvern_operator* op,
                                                  const wyvern_launch* launch);

/* ---- Stages ---- */

/* Version 2. A stage of the chunked form on its own, one kernel. Never changes. */
typedef struct wyvern_stage wyvern_stage;

/* Version 2. The stage of that name ("solve_tril"; `wyvern stages` lists them, templates/README.md
 * says what their tensors mean), for the problem's dimensions, dtypes and options, by its default
 * config for the problem's chunk_size (64 where it is unset). Gates are summed as they are. Else as
 * wyvern_prepare(); WYVERN_BAD_INPUT for a name that no kernel of the device has, and for a stage
 * that does not stand alone. */
WYVERN_C_API wyvern_status wyvern_prepare_stage(wyvern_runtime* runtime,
                                                const wyvern_device* device,
                                                const wyvern_problem* problem, const char* name,
                                                wyvern_stage** stage);
WYVERN_C_API void wyvern_stage_destroy(wyvern_stage* stage);
/* Version 2. The stage's tensors, as wyvern_problem_tensors() does; the names live as long as the
 * stage. */
WYVERN_C_API wyvern_status wyvern_stage_tensors(const wyvern_stage* stage,
                                                wyvern_tensor_spec* specs, size_t spec_size,
                                                size_t capacity, size_t* count);
/* Version 2. 1 in `takes` where a launch of the stage takes this tensor as it is, by its name,
 * dtype, shape, strides and address, whatever the others are; else 0: a copy in what
 * wyvern_stage_tensors() says will do. WYVERN_BAD_INPUT for a name that no tensor of the stage has.
 * `tensor_size`: sizeof(wyvern_tensor). */
WYVERN_C_API wyvern_status wyvern_stage_takes(const wyvern_stage* stage,
                                              const wyvern_tensor* tensor, size_t tensor_size,
                                              int32_t* takes);
/* Version 2. As wyvern_operator_launch(), but that a stage takes no workspace and no
 * cu_seqlens_host: what the launch has of these is not looked at. */
WYVERN_C_API wyvern_status wyvern_stage_launch(const wyvern_stage* stage,
                                               const wyvern_launch* launch);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* WYVERN_WYVERN_H */
