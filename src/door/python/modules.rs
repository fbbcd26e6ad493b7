//! torch's modules by the addresses of their objects, from the package: each with its name in the
//! module around it.
//!
//! The package announces a module while it lives, and withdraws it before its address can be reused
//! (a weak reference's callback), so no module gets the name of another.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

/// A module.
struct Module {
    /// A number that no other has had.
    number: u64,
    /// Its name in the module around it; of an outermost module, that of its class.
    name: Box<str>,
    /// The address and the number of the module around it.
    outer: Option<(usize, u64)>,
}

struct Table {
    by_address: Option<HashMap<usize, Module>>,
    /// The latest number.
    latest: u64,
}

/// Known modules at a time; beyond that, later ones have no name.
const MOST_MODULES: usize = 1 << 17;
/// Depth of modules; more is a circle.
const MOST_DEPTH: usize = 64;

static MODULES: RwLock<Table> = RwLock::new(Table { by_address: None, latest: 0 });

/// Names the module at `address`, inside the one at `outer`; where `outer` is 0, by its class.
pub(super) fn name(address: usize, outer: usize, name: &str) {
    let table = &mut *MODULES.write().unwrap_or_else(PoisonError::into_inner);
    let modules = table.by_address.get_or_insert_default();
    if modules.len() >= MOST_MODULES && !modules.contains_key(&address) {
        return;
    }
    let outer = modules.get(&outer).map(|module| (outer, module.number));
    table.latest += 1;
    // Its children stay its children.
    let number = modules.get(&address).map_or(table.latest, |module| module.number);
    modules.insert(address, Module { number, name: name.into(), outer });
}

/// Forgets the module at `address`.
pub(super) fn forget(address: usize) {
    let table = &mut *MODULES.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(modules) = table.by_address.as_mut() {
        modules.remove(&address);
    }
}

/// The number of the module at `address`; 0: it has no name.
#[inline]
pub(super) fn number(address: usize) -> u64 {
    if address == 0 {
        return 0;
    }
    let table = MODULES.read().unwrap_or_else(PoisonError::into_inner);
    let module = table.by_address.as_ref().and_then(|modules| modules.get(&address));
    module.map_or(0, |module| module.number)
}

/// The path of the module at `address`, from the outermost module around it: `layers.3.mlp`, or
/// `Sequential[3].mlp` where that one numbers its children; of an outermost module, its class.
/// Empty: it has no name.
pub(super) fn path(address: usize) -> String {
    let table = MODULES.read().unwrap_or_else(PoisonError::into_inner);
    let Some(modules) = table.by_address.as_ref() else { return String::new() };
    let Some(mut module) = modules.get(&address) else { return String::new() };
    let mut names = Vec::new();
    for _ in 0..MOST_DEPTH {
        names.push(&*module.name);
        let outer = module
            .outer
            .and_then(|(at, number)| modules.get(&at).filter(|outer| outer.number == number));
        match outer {
            Some(outer) => module = outer,
            None => break,
        }
    }
    let class = if names.len() > 1 { names.pop() } else { None };
    names.reverse();
    let is_number = |name: &str| !name.is_empty() && name.bytes().all(|c| c.is_ascii_digit());
    // A child's number needs its parent.
    match class.zip(names.split_first()) {
        Some((class, (first, rest))) if is_number(first) => {
            let inner: String = rest.iter().flat_map(|name| [".", name]).collect();
            format!("{class}[{first}]{inner}")
        }
        _ => names.join("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_the_names_from_the_outermost_module_which_has_that_of_its_class() {
        name(0x100, 0, "Model");
        name(0x110, 0, "ModuleList");
        name(0x120, 0x110, "3");
        name(0x110, 0x100, "layers");
        assert_eq!(path(0x120), "layers.3");
        assert_eq!((path(0x110), path(0x100)), ("layers".into(), "Model".into()));
        assert_eq!((path(0x130), number(0x130), path(0)), (String::new(), 0, String::new()));
    }

    #[test]
    fn a_number_is_told_with_the_class_that_gave_it() {
        name(0x400, 0, "Sequential");
        name(0x410, 0x400, "7");
        name(0x420, 0x410, "mlp");
        name(0x430, 0x420, "0");
        assert_eq!(
            (path(0x410), path(0x420)),
            ("Sequential[7]".into(), "Sequential[7].mlp".into())
        );
        assert_eq!(
            (path(0x430).as_str(), path(0x400).as_str()),
            ("Sequential[7].mlp.0", "Sequential")
        );
    }

    #[test]
    fn a_name_goes_with_its_module_and_the_next_at_its_address_is_another() {
        name(0x200, 0, "First");
        name(0x210, 0x200, "inner");
        let first = number(0x200);
        forget(0x200);
        assert_eq!((number(0x200), path(0x200)), (0, String::new()));
        name(0x200, 0, "Second");
        name(0x220, 0x200, "other");
        assert_ne!(number(0x200), first);
        // It was inside the first, and is outermost now.
        name(0x230, 0x210, "leaf");
        assert_eq!((path(0x230).as_str(), path(0x220).as_str()), ("leaf", "other"));
    }

    #[test]
    fn a_circle_of_modules_has_an_end() {
        name(0x300, 0, "A");
        name(0x310, 0x300, "b");
        name(0x300, 0x310, "a");
        assert!(path(0x310).len() <= 2 * MOST_DEPTH);
    }
}
