//! Which stream a handle names, and for how long the handle may be used.
//!
//! A call on a destroyed stream is undefined (cuda.h: "passing an invalid handle will result in
//! undefined behavior"), and no call can ask whether a stream still exists. So a handle goes to the
//! driver only while its stream certainly exists:
//! - *lasting* streams, until their end: the default ones, announced ones ([`Streams::lasts`]), and
//!   the calling thread's own;
//! - *passing* ones, all others, only inside a call in which the program names them. [`Resolved`]
//!   is that call.

use super::names::{Numbers, Resolved};
use super::stream::{
    DEAD, LASTING, PASSING, PER_THREAD, Stream, UNTOLD, WITHDRAWN, is_quiet, thread_has_ended,
    thread_token,
};
use super::{ALL_STREAMS, DEFAULT_STREAM, MAX_STREAMS, Streams};
use crate::driver::{Driver, ErrorKind, StreamHandle};
use crate::sync::{MutexGuard, lock};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

impl Streams {
    /// The stream that `handle` names now, in a call in which the program names it. `None`: it has
    /// no number, and all are taken.
    ///
    /// If the driver has stream ids, they reveal a recycled handle here; the old stream is dead
    /// from then on. The handle of an announced stream suffices. A capturing stream may refuse to
    /// give its id, and the question may end the capture: so the allocator first asks whether the
    /// stream captures. A capturing one is the stream that its handle was last known to name, or a
    /// new one.
    pub(crate) fn resolve(
        &self,
        driver: &dyn Driver,
        handle: StreamHandle,
    ) -> Option<Resolved<'_>> {
        if handle.is_default() {
            return Some(Resolved::lasting(DEFAULT_STREAM, None));
        }
        if handle == StreamHandle::ALL_STREAMS {
            return Some(Resolved::lasting(ALL_STREAMS, None));
        }
        let mut status = driver.capture_status(self.device, handle);
        if handle == PER_THREAD {
            let number = self.find_or_assign(handle, thread_token())?;
            return Some(Resolved {
                number,
                status: Some(status),
                due: self.is_due(number, status),
                call: None,
            });
        }
        if let Some(number) = self.announced(handle) {
            return Some(Resolved::lasting(number, Some(status)));
        }
        let mut identity = 0;
        if is_quiet(status) && self.ids {
            match driver.stream_id(self.device, handle) {
                Ok(told) => identity = told,
                // A capture has begun meanwhile.
                Err(error) if error.kind == ErrorKind::Capturing => status = Err(error),
                Err(_) => {}
            }
        }
        let (number, call) = if is_quiet(status) {
            self.resolve_identified(handle, identity)?
        } else {
            self.resolve_capturing(handle)?
        };
        Some(Resolved { number, status: Some(status), due: self.is_due(number, status), call })
    }

    /// The number that [`Streams::resolve`] gives a default or announced stream that captures
    /// nothing. `None`: any other stream, though it may have a number.
    #[inline]
    pub(crate) fn resolve_lasting(&self, driver: &dyn Driver, handle: StreamHandle) -> Option<u32> {
        if handle.is_default() {
            return Some(DEFAULT_STREAM);
        }
        let number = self.cached(handle).filter(|&number| self.is_lasting(number))?;
        is_quiet(driver.capture_status(self.device, handle)).then_some(number)
    }

    /// [`Streams::resolve_lasting`] that gives a number to a stream that has none yet.
    pub(crate) fn resolve_announced(
        &self,
        driver: &dyn Driver,
        handle: StreamHandle,
    ) -> Option<u32> {
        if !handle.is_default() {
            self.announced(handle)?;
        }
        self.resolve_lasting(driver, handle)
    }

    fn is_announced(&self, handle: StreamHandle) -> bool {
        lock(&self.numbers).lasting.contains(&handle.0)
    }

    /// The number of an announced stream; `None` also if all are taken.
    fn announced(&self, handle: StreamHandle) -> Option<u32> {
        if let Some(number) = self.cached(handle) {
            return self.is_lasting(number).then_some(number);
        }
        let mut numbers = lock(&self.numbers);
        let number = match numbers.by_handle.get(&handle.0) {
            Some(&known) => known,
            None if numbers.lasting.contains(&handle.0) => {
                self.assign(&mut numbers, handle, UNTOLD)?
            }
            None => return None,
        };
        drop(numbers);
        self.is_lasting(number).then(|| {
            self.cache.put(handle, number);
            number
        })
    }

    /// The number under which a handle was seen last, if that stream exists and still has the
    /// handle.
    #[inline]
    fn cached(&self, handle: StreamHandle) -> Option<u32> {
        let number = self.cache.get(handle)?;
        let stream = self.get(number)?;
        (!stream.is_dead() && stream.handle() == handle).then_some(number)
    }

    pub(super) fn is_lasting(&self, number: u32) -> bool {
        self.get(number).is_some_and(Stream::is_lasting)
    }

    /// The number of a capturing stream, whose id cannot be asked.
    fn resolve_capturing(&self, handle: StreamHandle) -> Option<(u32, Option<&Stream>)> {
        let mut numbers = lock(&self.numbers);
        let number = match numbers.find(handle, UNTOLD).filter(|&known| !self.is_dead(known)) {
            Some(known) => known,
            None => self.assign(&mut numbers, handle, UNTOLD)?,
        };
        // Under the lock under which numbers are taken away.
        Some((number, self.get(number).and_then(Stream::enter)))
    }

    fn resolve_identified(
        &self,
        handle: StreamHandle,
        identity: u64,
    ) -> Option<(u32, Option<&Stream>)> {
        if let Some(number) = self.cached(handle)
            && let Some(stream) = self.get(number)
        {
            // Looked at again once the call is counted: before that, the number may have passed to
            // another stream.
            let call = stream.enter();
            if !stream.is_dead() && stream.handle() == handle && stream.identity() == identity {
                return Some((number, call));
            }
            stream.leave();
        }
        let mut guard = lock(&self.numbers);
        let numbers = &mut *guard;
        let names = |&known: &u32| {
            self.get(known).is_some_and(|stream| !stream.is_dead() && stream.is_called(identity))
        };
        let found = match numbers.find(handle, identity).filter(names) {
            Some(found) => found,
            None => self.assign(numbers, handle, identity)?,
        };
        self.cache.put(handle, found);
        Some((found, self.get(found).and_then(Stream::enter)))
    }

    fn find_or_assign(&self, handle: StreamHandle, identity: u64) -> Option<u32> {
        let mut numbers = lock(&self.numbers);
        let known = numbers.find(handle, identity).filter(|&known| !self.is_dead(known));
        known.or_else(|| self.assign(&mut numbers, handle, identity))
    }

    /// Gives a number to a stream that has none.
    fn assign(&self, numbers: &mut Numbers, handle: StreamHandle, identity: u64) -> Option<u32> {
        let count = self.count.load(Ordering::Relaxed);
        let lasting = handle != PER_THREAD && numbers.lasting.contains(&handle.0);
        let new = match numbers.unused.pop() {
            Some(unused) => {
                // A thread about to record an event on the number's old stream is done with that,
                // or will find the stream changed.
                let _fences = lock(&self.fences);
                self.get(unused)?.becomes(handle, identity, lasting);
                if self.lost.remove(unused) {
                    self.unfenced.insert(unused);
                }
                unused
            }
            None if count as usize == MAX_STREAMS => return None,
            None => {
                let state = if lasting { LASTING } else { PASSING };
                let _ = self.streams[count as usize].set(Stream::new(handle, identity, state));
                self.count.store(count + 1, Ordering::Release);
                count
            }
        };
        if lasting {
            self.lasting.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(old) = numbers.insert(handle, identity, new).and_then(|old| self.get(old)) {
            self.bury(old);
        }
        Some(new)
    }

    /// Marks the stream of `handle`, which exists, as lasting: the program promises to announce its
    /// end ([`Streams::end`]) before it destroys it.
    pub(crate) fn lasts(&self, driver: &dyn Driver, handle: StreamHandle) {
        if handle.0 <= PER_THREAD.0
            || handle == StreamHandle::ALL_STREAMS
            || self.is_announced(handle)
        {
            return;
        }
        let known = lock(&self.numbers).by_handle.contains_key(&handle.0);
        // The stream known under the handle may be gone. One whose id cannot be asked gets a new
        // number.
        let same = known
            && is_quiet(driver.capture_status(self.device, handle))
            && (!self.ids || self.names(handle, driver.stream_id(self.device, handle).ok()));
        let mut numbers = lock(&self.numbers);
        numbers.lasting.insert(handle.0);
        let Some(stream) = numbers.by_handle.get(&handle.0).and_then(|&number| self.get(number))
        else {
            return;
        };
        let lasts =
            || stream.state.compare_exchange(PASSING, LASTING, Ordering::SeqCst, Ordering::SeqCst);
        if same && lasts().is_ok() {
            self.lasting.fetch_add(1, Ordering::Relaxed);
        } else {
            self.bury(stream);
            numbers.by_handle.remove(&handle.0);
        }
    }

    fn bury(&self, stream: &Stream) {
        if stream.state.swap(DEAD, Ordering::SeqCst) == LASTING {
            self.lasting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether the stream last known by `handle` has this id.
    fn names(&self, handle: StreamHandle, id: Option<u64>) -> bool {
        let number = lock(&self.numbers).by_handle.get(&handle.0).copied();
        let stream = number.and_then(|number| self.get(number));
        id.zip(stream).is_some_and(|(id, stream)| stream.identity() == id)
    }

    /// Buries the stream that `handle` names, as the program destroys it: no thread is in a call on
    /// it when this returns. Fence it before, if that can be done.
    pub(crate) fn end(&self, handle: StreamHandle) {
        let mut numbers = lock(&self.numbers);
        numbers.lasting.remove(&handle.0);
        let ended = numbers.by_handle.remove(&handle.0);
        drop(numbers);
        if let Some(stream) = ended.and_then(|number| self.get(number)) {
            self.bury(stream);
            // A thread that asks a lasting stream unnamed by its call does so under this lock, and
            // checks under it that the stream lasts.
            drop(lock(&self.fences));
        }
    }

    /// Buries all streams but the default one: all that was enqueued is done, and the device's
    /// context is made anew.
    pub(crate) fn end_all(&self) {
        let mut numbers = lock(&self.numbers);
        for stream in (1..self.count()).filter_map(|number| self.get(number)) {
            self.bury(stream);
        }
        numbers.by_handle.clear();
        numbers.by_thread.clear();
        numbers.lasting.clear();
    }

    /// Whether `handle` has a number, or was announced.
    pub(crate) fn is_known(&self, handle: StreamHandle) -> bool {
        let numbers = lock(&self.numbers);
        if handle == PER_THREAD {
            !numbers.by_thread.is_empty()
        } else {
            numbers.by_handle.contains_key(&handle.0) || numbers.lasting.contains(&handle.0)
        }
    }

    /// Held while a thread looks for numbers to use again.
    pub(crate) fn recycling(&self) -> MutexGuard<'_, ()> {
        lock(&self.recycling)
    }

    /// Takes the numbers away from dead streams, and from passing ones that no call names now:
    /// which of those are gone cannot be known, and one that comes again gets another number.
    /// Follow it with [`Streams::release`]; hold [`Streams::recycling`] over both.
    pub(crate) fn withdraw(&self) -> HashSet<u32> {
        let numbers = lock(&self.numbers);
        let unused: HashSet<u32> = numbers.unused.iter().copied().collect();
        let is_gone = |stream: &Stream| match stream.handle() {
            handle if handle.0 < PER_THREAD.0 => false,
            _ if stream.is_dead() => true,
            PER_THREAD => {
                let ended = thread_has_ended(stream.thread.load(Ordering::Acquire));
                if ended {
                    self.bury(stream);
                }
                ended
            }
            _ => stream.withdraw(),
        };
        (0..self.count())
            .filter(|number| !unused.contains(number) && self.get(*number).is_some_and(is_gone))
            .collect()
    }

    /// Frees the `withdrawn` numbers that are in `released`, since nothing refers to them; the
    /// others return to their states, unless their streams have got other numbers meanwhile.
    pub(crate) fn release(&self, withdrawn: &HashSet<u32>, released: &[u32]) {
        let released: HashSet<u32> = released.iter().copied().collect();
        let mut guard = lock(&self.numbers);
        let numbers = &mut *guard;
        for &number in withdrawn.difference(&released) {
            let Some(stream) = self.get(number) else { continue };
            let is_named = numbers.by_handle.get(&stream.handle().0) == Some(&number);
            let state = if is_named { PASSING } else { DEAD };
            let _ =
                stream.state.compare_exchange(WITHDRAWN, state, Ordering::SeqCst, Ordering::SeqCst);
        }
        numbers.by_handle.retain(|_, number| !released.contains(number));
        numbers.by_thread.retain(|_, number| !released.contains(number));
        numbers.unused.extend(released);
    }
}
