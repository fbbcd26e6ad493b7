//! Link arguments of libgruyere.so.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Never unloaded: hooks may be called, and fork and thread handlers run, after somebody's
    // dlclose.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
