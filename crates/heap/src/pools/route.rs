//! The pool that serves the calling thread's requests.
//!
//! A thread enters pools and leaves them, innermost first. A request goes to the innermost pool on
//! its device; a device on which the thread has entered no pool serves it as usual. One bit of the
//! thread's tags ([`lifetime::Tags`]) marks a thread that is in a pool, so every other thread pays
//! one test.

use crate::lifetime;
use crate::pools::PoolNumber;
use crate::pools::key::{PoolKey, ROUTE_DEPTH};
use std::cell::Cell;

thread_local! {
    // Without a destructor, as the tags.
    static ROUTE: Cell<([PoolKey; ROUTE_DEPTH], usize)> =
        const { Cell::new(([PoolKey(0); ROUTE_DEPTH], 0)) };
}

/// Sends the calling thread's next requests to `pool`. False, and nothing done, if the thread is in
/// [`ROUTE_DEPTH`] pools already.
pub(crate) fn enter(pool: PoolKey) -> bool {
    ROUTE.with(|cell| {
        let (mut pools, depth) = cell.get();
        let Some(place) = pools.get_mut(depth) else { return false };
        *place = pool;
        cell.set((pools, depth + 1));
        lifetime::set_routed(true);
        true
    })
}

/// Ends the latest [`enter`], which must have been of `pool`. False, and nothing done, otherwise.
pub(crate) fn leave(pool: PoolKey) -> bool {
    ROUTE.with(|cell| {
        let (pools, depth) = cell.get();
        let Some(last) = depth.checked_sub(1).filter(|&last| pools[last] == pool) else {
            return false;
        };
        cell.set((pools, last));
        lifetime::set_routed(last > 0);
        true
    })
}

/// The pool that serves the calling thread's requests on `device`.
pub(crate) fn pool_on(device: u32) -> Option<PoolNumber> {
    let (pools, depth) = ROUTE.with(Cell::get);
    pools[..depth].iter().rev().find(|pool| pool.device() == device).map(|pool| pool.number())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pools::FIRST_NAMED;

    const N: PoolNumber = FIRST_NAMED;

    #[test]
    fn the_innermost_pool_of_the_device_counts() {
        let pools = [(0, 1), (1, 1), (0, 2)].map(|(device, number)| PoolKey::new(device, number));
        assert!(pools.iter().all(|&pool| enter(pool)));
        assert_eq!([pool_on(0), pool_on(1), pool_on(2)], [Some(N + 2), Some(N + 1), None]);
        assert!(!leave(pools[0]), "not the latest");
        assert!(leave(pools[2]));
        assert_eq!(pool_on(0), Some(N + 1));
        assert!(lifetime::tags().is_routed());
        assert!(leave(pools[1]) && leave(pools[0]) && !leave(pools[0]));
        assert!(!lifetime::tags().is_routed() && pool_on(0).is_none());
    }

    #[test]
    fn a_pool_too_many_is_refused_and_nothing_is_lost() {
        let pool = PoolKey::new(3, 4);
        assert!((0..ROUTE_DEPTH).all(|_| enter(pool)));
        assert!(!enter(PoolKey::new(3, 5)));
        assert_eq!(pool_on(3), Some(N + 4));
        assert!((0..ROUTE_DEPTH).all(|_| leave(pool)));
        assert!(!leave(pool));
    }
}
