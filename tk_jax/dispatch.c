/* The only XLA FFI target of tk_jax: call(number, *operands, *results) runs the call that `number` was defined to be.

   define(number, "name|order|scalars") tells which TVM-FFI global function it calls, which buffer every tensor parameter takes
   (-1 is None), and the scalars that follow: i<decimal>, or f<the bits of a double in hexadecimal>, exact in every locale.
   A number and not the text itself is the attribute, because a string attribute of jax-tvm-ffi 0.1.3 is freed before it arrives. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_PARAMETERS 64
#define BUCKETS 4096

typedef struct Call {
  struct Call* next;
  int64_t number;
  char* name;     /* the kernel's name */
  int tensors;    /* kernel parameters that are tensors */
  int parameters; /* tensors and scalars */
  int order[MAX_PARAMETERS];
  TVMFFIAny scalars[MAX_PARAMETERS]; /* from index `tensors` on */
  TVMFFIObjectHandle function;
  int64_t launches;
} Call;

/* Entries are added under the lock and never removed: readers need no lock. */
static Call* table[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int fail(const char* kind, const char* what, const char* detail) {
  char message[640];
  snprintf(message, sizeof message, "tk_jax: %s: %.480s", what, detail);
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

/* ------------------------------------------------------------------ definitions */

/* A copy of a string argument, which TVM-FFI stores in one of several ways; NULL where it is none. */
static char* copy_string(const TVMFFIAny* value) {
  TVMFFIByteArray text;
  if (value->type_index == kTVMFFIStr) {
    text = *(const TVMFFIByteArray*)((const char*)value->v_obj + sizeof(TVMFFIObject));
  } else if (value->type_index == kTVMFFISmallStr) {
    text.data = value->v_bytes;
    text.size = value->small_str_len;
  } else if (value->type_index == kTVMFFIRawStr) {
    text.data = value->v_c_str;
    text.size = strlen(value->v_c_str);
  } else {
    return NULL;
  }
  char* copy = malloc(text.size + 1);
  if (copy) {
    memcpy(copy, text.data, text.size);
    copy[text.size] = 0;
  }
  return copy;
}

/* Read "name|order|scalars" into an entry, which keeps the text; 0 where it is of another form. */
static int parse(Call* call, char* text) {
  call->name = text;
  char* at = strchr(text, '|');
  if (!at) return 0;
  *at++ = 0;
  char* end;
  while (*at && *at != '|') {
    if (call->tensors == MAX_PARAMETERS) return 0;
    call->order[call->tensors++] = (int)strtol(at, &end, 10);
    if (end == at) return 0;
    at = *end == ',' ? end + 1 : end;
  }
  call->parameters = call->tensors;
  if (*at++ != '|') return 0;
  while (*at) {
    if (call->parameters == MAX_PARAMETERS) return 0;
    TVMFFIAny* scalar = &call->scalars[call->parameters++];
    if (*at == 'f') {
      scalar->type_index = kTVMFFIFloat;
      scalar->v_uint64 = strtoull(at + 1, &end, 16);
    } else if (*at == 'i') {
      scalar->type_index = kTVMFFIInt;
      scalar->v_int64 = strtoll(at + 1, &end, 10);
    } else {
      return 0;
    }
    if (end == at + 1) return 0;
    at = *end == ',' ? end + 1 : end;
  }
  return 1;
}

static Call* find(int64_t number) {
  Call* call = __atomic_load_n(&table[(uint64_t)number % BUCKETS], __ATOMIC_ACQUIRE);
  while (call && call->number != number) call = call->next;
  return call;
}

EXPORT int __tvm_ffi_define(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  if (n != 2 || args[0].type_index != kTVMFFIInt) return fail("TypeError", "define", "expected a number and a text");
  int64_t number = args[0].v_int64;
  if (find(number)) return 0;
  Call* call = calloc(1, sizeof(Call));
  char* text = copy_string(&args[1]);
  if (!call || !text || !parse(call, text)) {
    free(call);
    free(text);
    return fail("ValueError", "define", "the text is not of the form name|order|scalars");
  }
  call->number = number;
  pthread_mutex_lock(&lock);
  if (find(number)) {
    free(call);
    free(text);
  } else {
    Call** bucket = &table[(uint64_t)number % BUCKETS];
    call->next = *bucket;
    __atomic_store_n(bucket, call, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

/* ------------------------------------------------------------------ calls */

static TVMFFIObjectHandle global_function(const char* name) {
  TVMFFIByteArray key = {name, strlen(name)};
  TVMFFIObjectHandle found = NULL;
  return TVMFFIFunctionGetGlobal(&key, &found) == 0 ? found : NULL;
}

/* The kernel's function; one that this process has not loaded (another process exported the program) is asked of Python. */
static TVMFFIObjectHandle resolve(Call* call) {
  TVMFFIObjectHandle known = __atomic_load_n(&call->function, __ATOMIC_ACQUIRE);
  if (known) return known;
  TVMFFIObjectHandle found = global_function(call->name);
  TVMFFIObjectHandle load = found ? NULL : global_function("tk_jax.load_kernel");
  if (load) {
    TVMFFIAny name, none;
    memset(&name, 0, sizeof name);
    memset(&none, 0, sizeof none);
    name.type_index = kTVMFFIRawStr;
    name.v_c_str = call->name;
    int failed = TVMFFIFunctionCall(load, &name, 1, &none);
    TVMFFIObjectDecRef(load);
    if (failed) return NULL;
    found = global_function(call->name);
  }
  if (!found) {
    fail("RuntimeError", "kernel is not loaded in this process", call->name);
    return NULL;
  }
  /* the table keeps the reference for as long as the process lives */
  if (__atomic_compare_exchange_n(&call->function, &known, found, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return found;
  TVMFFIObjectDecRef(found);
  return known;
}

EXPORT int __tvm_ffi_call(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  Call* call = n > 0 && args[0].type_index == kTVMFFIInt ? find(args[0].v_int64) : NULL;
  if (!call) {
    return fail("RuntimeError", "a call that this process has not lowered",
                "the program was exported by another process; call tk_jax.load(exported) before it runs");
  }
  TVMFFIObjectHandle function = resolve(call);
  if (!function) return -1;
  TVMFFIAny parameters[MAX_PARAMETERS];
  for (int i = 0; i < call->tensors; ++i) {
    int from = call->order[i];
    if (from >= n - 1) return fail("ValueError", "too few buffers for kernel", call->name);
    if (from >= 0) {
      parameters[i] = args[1 + from];
    } else {
      memset(&parameters[i], 0, sizeof parameters[i]);
    }
  }
  for (int i = call->tensors; i < call->parameters; ++i) parameters[i] = call->scalars[i];
  if (TVMFFIFunctionCall(function, parameters, call->parameters, result)) return -1;
  __atomic_fetch_add(&call->launches, 1, __ATOMIC_RELAXED);
  return 0;
}

/* counts(reset): a line "name launches" for every definition that was launched; with reset, the counters start again at zero. */
EXPORT int __tvm_ffi_counts(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  int reset = n > 0 && args[0].v_int64 != 0;
  char* lines = NULL;
  size_t size = 0;
  FILE* out = open_memstream(&lines, &size);
  if (!out) return fail("MemoryError", "counts", "no memory");
  for (int i = 0; i < BUCKETS; ++i) {
    for (Call* call = __atomic_load_n(&table[i], __ATOMIC_ACQUIRE); call; call = call->next) {
      int64_t launches = reset ? __atomic_exchange_n(&call->launches, 0, __ATOMIC_RELAXED) : __atomic_load_n(&call->launches, __ATOMIC_RELAXED);
      if (launches) fprintf(out, "%s %lld\n", call->name, (long long)launches);
    }
  }
  fclose(out);
  TVMFFIByteArray text = {lines, size};
  int failed = TVMFFIStringFromByteArray(&text, result);
  free(lines);
  return failed;
}
