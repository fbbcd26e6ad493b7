//! The places in the program that set its devices' ceilings.
#![deny(unsafe_code)]

use crate::record::SiteId;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static SET_AT: Mutex<BTreeMap<u32, SiteId>> = Mutex::new(BTreeMap::new());

/// Notes that the ceiling of `device` was set at `site`; [`SiteId::NONE`]: not by the program.
pub fn set_at(device: u32, site: SiteId) {
    SET_AT.lock().unwrap_or_else(PoisonError::into_inner).insert(device, site);
}

/// The site at which the ceiling of `device` was set, by the record's number.
pub fn site(device: u32) -> SiteId {
    let known = SET_AT.lock().unwrap_or_else(PoisonError::into_inner);
    known.get(&device).copied().unwrap_or(SiteId::NONE)
}
