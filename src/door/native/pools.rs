//! torch's pools: `torch.cuda.MemPool`, and the pool scopes of captures.
//!
//! torch knows one kind of pool scope: a pool's id, and a filter that decides by stream whether a
//! request belongs to it. A capture's filter matches once its stream captures; the heap asks the
//! driver about that anyway (`crates/heap/src/pools/capture.rs`), so such a scope is only announced
//! to it. All other filters (this thread's requests, a stream's, all requests) match from the
//! beginning. While open, they are asked here at each request, the latest first and with no lock
//! held. Their requests get memory from a named pool of the heap, which is fed with segments
//! ([`super::segments`]).
//!
//! One id may serve both: a MemPool that a graph is captured into, or a pool of graphs in which the
//! graph trees warm up and copy inputs. While a graph uses it, all its requests go to the graphs'
//! memory: a captured kernel may read an input's address long after the input is freed, so that
//! memory must stay. A release does not name the reference that it gives up, so the pool's go
//! first: a graph's memory stays until nothing can use it.

use super::super::torch::CudaStream;
use super::boxed::Filter;
use super::segments::{Held, Source};
use crate::heap::{Heap, PoolError, PoolId, PoolKey};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// Prefix of the names of the heap's pools that are torch's.
const NAME: &str = "torch MemPool ";

/// A begin without its end.
struct PoolScope {
    device: i32,
    id: PoolId,
    thread: ThreadId,
    /// `None`: a capture's.
    filter: Option<Arc<Filter>>,
}

/// A pool of torch's.
#[derive(Default)]
struct Known {
    /// References other than captures.
    uses: u32,
    /// Captures begun and not released.
    captures: u32,
    /// Its memory, if any, with its source.
    memory: Option<Memory>,
    /// Whether it serves other requests before an out-of-memory.
    on_oom: bool,
}

/// A pool's memory.
#[derive(Clone)]
pub(super) struct Memory {
    pub(super) key: PoolKey,
    pub(super) source: Arc<Source>,
}

impl Memory {
    /// The pool with this memory.
    pub(super) fn held<'a>(&'a self, heap: &'a Heap, device: i32, id: PoolId) -> Held<'a> {
        Held { heap, device, id, key: self.key, source: &self.source }
    }
}

impl Known {
    fn is_used(&self) -> bool {
        self.uses + self.captures > 0
    }
}

#[derive(Default)]
struct Books {
    pool_scopes: Vec<PoolScope>,
    known: BTreeMap<(i32, PoolId), Known>,
}

static BOOKS: Mutex<Books> = Mutex::new(Books { pool_scopes: Vec::new(), known: BTreeMap::new() });
/// Held, before the books, while a pool is made or destroyed: no thread may take up a pool that
/// another has found unused.
static CHANGES: Mutex<()> = Mutex::new(());
/// Open pool scopes with a filter; at 0, requests look no further.
static FILTERS: AtomicU32 = AtomicU32::new(0);

fn books() -> MutexGuard<'static, Books> {
    BOOKS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn changes() -> MutexGuard<'static, ()> {
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn name((first, second): PoolId) -> String {
    format!("{NAME}{first}.{second}")
}

/// torch's id of the pool that the heap calls `name`.
pub(super) fn id_of(name: &str) -> Option<PoolId> {
    let (first, second) = name.strip_prefix(NAME)?.split_once('.')?;
    Some((first.parse().ok()?, second.parse().ok()?))
}

/// Whether a request must call [`route`].
#[inline]
pub(super) fn has_filters() -> bool {
    FILTERS.load(Ordering::Acquire) != 0
}

/// A filter failed to decide.
pub(super) struct FilterFailed;

/// The destination of a pool scope's requests.
pub(super) enum Route {
    /// To the pool's own segments.
    Segments(PoolId, Memory),
    /// To the memory of the graphs that were captured into it.
    Graphs(PoolId),
}

impl Known {
    fn route(&self, id: PoolId) -> Option<Route> {
        let memory = self.memory.as_ref();
        let is_foreign =
            memory.is_some_and(|memory| matches!(*memory.source, Source::Foreign { .. }));
        // A pool over another allocator keeps to that allocator's memory, graphs or not.
        if self.captures > 0 && !is_foreign {
            return Some(Route::Graphs(id));
        }
        memory.map(|memory| Route::Segments(id, memory.clone()))
    }
}

/// The pool of a request.
pub(super) fn route(device: i32, stream: CudaStream) -> Result<Option<Route>, FilterFailed> {
    let open: Vec<(Arc<Filter>, Option<Route>)> = {
        let books = books();
        // The innermost of nested scopes counts, as in every torch with this door.
        let latest_first = books.pool_scopes.iter().rev();
        let here = latest_first.filter(|pool_scope| pool_scope.device == device);
        here.filter_map(|pool_scope| {
            let known = books.known.get(&(device, pool_scope.id));
            let route = known.and_then(|known| known.route(pool_scope.id));
            Some((Arc::clone(pool_scope.filter.as_ref()?), route))
        })
        .collect()
    };
    for (filter, route) in open {
        if filter.matches(stream).ok_or(FilterFailed)? {
            return Ok(route);
        }
    }
    Ok(None)
}

/// The pools of `device` that serve other requests before an out-of-memory.
pub(super) fn last_resorts(device: i32) -> Vec<PoolKey> {
    let books = books();
    let here = books.known.iter().filter(|((on, _), known)| *on == device && known.on_oom);
    here.filter_map(|(_, known)| Some(known.memory.as_ref()?.key)).collect()
}

/// Makes a pool, or adds a reference. The segments of a new pool come from `foreign`, or from the
/// driver where that is `None`.
pub(super) fn create(
    heap: &Heap,
    device: i32,
    id: PoolId,
    foreign: Option<Source>,
) -> Result<(), PoolError> {
    let _changes = changes();
    let known = books().known.get(&(device, id)).and_then(|known| known.memory.clone());
    let memory = match known {
        Some(memory) if foreign.is_some() => return Err(PoolError::Begun(memory.key)),
        Some(memory) => memory,
        None => {
            let key = heap.pool_create(&name(id), i64::from(device), 0, None)?;
            heap.pool_from_outside(key, true)?;
            Memory { key, source: Arc::new(foreign.unwrap_or(Source::Driver)) }
        }
    };
    let mut books = books();
    let known = books.known.entry((device, id)).or_default();
    known.uses += 1;
    known.memory = Some(memory);
    Ok(())
}

/// Gives the pool's blocks segments of their own from now on. False: there is no such pool.
pub(super) fn set_no_split(heap: &Heap, device: i32, id: PoolId) -> Result<bool, PoolError> {
    let memory = books().known.get(&(device, id)).and_then(|known| known.memory.clone());
    let Some(memory) = memory else { return Ok(false) };
    heap.pool_from_outside(memory.key, false).map(|()| true)
}

/// Gives back what the unused pools of `device` hold. Returns whether there was such a pool.
pub(super) fn give_back_unused(heap: &Heap, device: i32) -> bool {
    let unused: Vec<(PoolId, Memory)> = {
        let books = books();
        let here = books.known.iter().filter(|((on, _), known)| *on == device && !known.is_used());
        here.filter_map(|(&(_, id), known)| Some((id, known.memory.clone()?))).collect()
    };
    for (id, memory) in &unused {
        give_back(heap, device, *id, memory);
    }
    !unused.is_empty()
}

/// Gives back the idle memory of an unused pool, and forgets the pool once it holds nothing.
fn give_back(heap: &Heap, device: i32, id: PoolId, memory: &Memory) {
    // A thread that takes the pool up meanwhile must get its segments anew.
    memory.held(heap, device, id).give_back();
    // Dropped last, with no lock held: this drops the pool's allocator.
    let mut _gone = None;
    let _changes = changes();
    let mut books = books();
    let Some(known) = books.known.get_mut(&(device, id)) else { return };
    if !known.is_used()
        && known.memory.as_ref().is_some_and(|now| now.key == memory.key)
        && heap.pool_forget(memory.key)
    {
        _gone = known.memory.take();
        books.known.remove(&(device, id));
    }
}

/// Begins a pool scope, which references the pool; `filter` is `None` for a capture.
pub(super) fn begin(
    heap: &Heap,
    device: i32,
    id: PoolId,
    filter: Option<Filter>,
) -> Result<(), PoolError> {
    let thread = thread::current().id();
    let Some(filter) = filter else {
        heap.begin_allocate_to_pool(i64::from(device), id)?;
        let mut books = books();
        books.known.entry((device, id)).or_default().captures += 1;
        books.pool_scopes.push(PoolScope { device, id, thread, filter: None });
        return Ok(());
    };
    create(heap, device, id, None)?;
    books().pool_scopes.push(PoolScope { device, id, thread, filter: Some(Arc::new(filter)) });
    FILTERS.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

/// Ends the pool's latest scope, preferring the calling thread's. False: none is open.
pub(super) fn end(heap: &Heap, device: i32, id: PoolId) -> Result<bool, PoolError> {
    let mine = thread::current().id();
    let pool_scope = {
        let mut books = books();
        let of_pool = |pool_scope: &PoolScope| pool_scope.device == device && pool_scope.id == id;
        let at = books
            .pool_scopes
            .iter()
            .rposition(|pool_scope| of_pool(pool_scope) && pool_scope.thread == mine);
        let Some(at) = at.or_else(|| books.pool_scopes.iter().rposition(of_pool)) else {
            return Ok(false);
        };
        books.pool_scopes.remove(at)
    };
    match pool_scope.filter {
        Some(filter) => {
            FILTERS.fetch_sub(1, Ordering::AcqRel);
            outlast(filter);
        }
        None => heap.end_allocate_to_pool(i64::from(device), id)?,
    }
    Ok(true)
}

/// Waits until no thread uses the filter: what it reads may be gone once its pool scope has ended.
fn outlast(mut filter: Arc<Filter>) {
    // A filter that ends a pool scope itself would wait for itself.
    while !Filter::is_inside() {
        match Arc::try_unwrap(filter) {
            Ok(_) => return,
            Err(asked) => filter = asked,
        }
        thread::yield_now();
    }
}

/// Gives up a reference to the pool. False: there is none.
pub(super) fn release(heap: &Heap, device: i32, id: PoolId) -> Result<bool, PoolError> {
    let of_capture = {
        let mut books = books();
        let Some(known) = books.known.get_mut(&(device, id)).filter(|known| known.is_used()) else {
            return Ok(false);
        };
        let of_capture = known.uses == 0;
        if of_capture {
            known.captures -= 1;
        } else {
            known.uses -= 1;
        }
        if !known.is_used() && known.memory.is_none() {
            books.known.remove(&(device, id));
        }
        of_capture
    };
    if of_capture {
        heap.release_pool(i64::from(device), id)?;
    }
    Ok(true)
}

/// References to the pool.
pub(super) fn uses(device: i32, id: PoolId) -> u32 {
    books().known.get(&(device, id)).map_or(0, |known| known.uses + known.captures)
}

/// Sets whether the pool serves other requests before an out-of-memory. False: there is no such
/// pool.
pub(super) fn set_on_oom(device: i32, id: PoolId, wanted: bool) -> bool {
    books().known.get_mut(&(device, id)).map(|known| known.on_oom = wanted).is_some()
}

/// `emptyCache`, of all memory or of one pool's, on all devices: unused memory goes back to the
/// device. A pool in use keeps its memory, as under torch's own allocator: only its creator knows
/// whether another allocator's memory is available now.
pub(super) fn empty(heap: &Heap, only: Option<PoolId>) {
    let mut whole = only.is_none();
    let unused: Vec<(i32, PoolId, Memory)> = {
        let books = books();
        let wanted = books.known.iter().filter(|((_, id), _)| only.is_none_or(|only| only == *id));
        // A graph's memory belongs to no pool: only a search of everything finds it.
        wanted
            .filter_map(|(&(device, id), known)| {
                whole |= known.captures > 0;
                Some((device, id, known.memory.clone().filter(|_| !known.is_used())?))
            })
            .collect()
    };
    for (device, id, memory) in &unused {
        give_back(heap, *device, *id, memory);
    }
    if whole {
        heap.trim();
    }
}

#[cfg(test)]
mod tests {
    use super::super::boxed::{Boxed, GruyereBoxed};
    use super::*;
    use std::ffi::{c_int, c_void};
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    static ASKED: AtomicBool = AtomicBool::new(false);
    static ANSWERED: AtomicBool = AtomicBool::new(false);

    extern "C" fn drop_nothing(_: *mut c_void) {}

    extern "C" fn slow(_: *mut c_void, _: CudaStream) -> c_int {
        ASKED.store(true, Ordering::Release);
        thread::sleep(Duration::from_millis(50));
        ANSWERED.store(true, Ordering::Release);
        1
    }

    extern "C" fn ends_itself(filter: *mut c_void, _: CudaStream) -> c_int {
        // SAFETY: the test's own pointer; its target outlives the call.
        let filter = unsafe { &*filter.cast::<Mutex<Option<Arc<Filter>>>>() };
        let kept = filter.lock().unwrap().take().unwrap();
        outlast(kept);
        0
    }

    fn filter(object: *mut c_void, ask: super::super::boxed::GruyereFilter) -> Arc<Filter> {
        Arc::new(Filter::new(Boxed::new(GruyereBoxed { object, drop: drop_nothing }).unwrap(), ask))
    }

    #[test]
    fn an_end_waits_for_those_that_ask_the_filter_but_not_for_its_own_thread() {
        let asked = filter(std::ptr::dangling_mut(), slow);
        let held = Arc::clone(&asked);
        let other = thread::spawn(move || held.matches(std::ptr::null_mut()));
        while !ASKED.load(Ordering::Acquire) {
            thread::yield_now();
        }
        outlast(asked);
        assert!(ANSWERED.load(Ordering::Acquire));
        assert_eq!(other.join().unwrap(), Some(true));
        let own = Mutex::new(None);
        let asked = filter((&raw const own).cast_mut().cast(), ends_itself);
        *own.lock().unwrap() = Some(Arc::clone(&asked));
        assert_eq!(asked.matches(std::ptr::null_mut()), Some(false));
    }

    #[test]
    fn the_heaps_name_of_a_pool_tells_torchs_id() {
        assert_eq!(id_of(&name((0, 7))), Some((0, 7)));
        assert_eq!(id_of(&name((u64::MAX, 0))), Some((u64::MAX, 0)));
        assert_eq!(
            (id_of("kv-cache"), id_of("torch MemPool 1"), id_of("torch MemPool a.b")),
            (None, None, None)
        );
    }
}
