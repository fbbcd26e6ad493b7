//! Where the program set the ceilings of its devices.
#![deny(unsafe_code)]

use crate::record::SiteId;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static SET_AT: Mutex<BTreeMap<u32, SiteId>> = Mutex::new(BTreeMap::new());

/// The ceiling of `device` is now the one that was set at `site`; [`SiteId::NONE`]: nobody did.
pub fn set_at(device: u32, site: SiteId) {
    SET_AT.lock().unwrap_or_else(PoisonError::into_inner).insert(device, site);
}

/// Where the ceiling of `device` was set, by the record's number of the site.
pub fn site(device: u32) -> SiteId {
    let known = SET_AT.lock().unwrap_or_else(PoisonError::into_inner);
    known.get(&device).copied().unwrap_or(SiteId::NONE)
}
