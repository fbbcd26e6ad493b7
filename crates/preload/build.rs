//! Link arguments of libgruyere_driver.so.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Never unloaded: the addresses of its functions are handed out, and the dynamic linker binds
    // everybody's `dlsym` to it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
