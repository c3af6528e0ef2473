//! The atomics by which a reactor and other threads meet: the standard library's. In tests each access is also a point at
//! which an explorer may let another thread go on ([`explore`]), so that the code as it is can be tried under many orders.
#![forbid(unsafe_code)]

#[cfg(test)]
pub(super) use explored::{AtomicBool, AtomicU64, explore, fence};
#[cfg(not(test))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, fence};

#[cfg(test)]
mod explored {
    use std::cell::Cell;
    use std::sync::atomic::{self, Ordering};

    std::thread_local! {
        static SWITCH: Cell<Option<fn()>> = const { Cell::new(None) };
    }

    /// From now on `switch` is called before each access that this thread makes; `None` ends that.
    pub fn explore(switch: Option<fn()>) {
        SWITCH.set(switch);
    }

    fn point() {
        if let Some(switch) = SWITCH.get() {
            switch();
        }
    }

    pub struct AtomicBool(atomic::AtomicBool);

    impl AtomicBool {
        pub const fn new(value: bool) -> AtomicBool {
            AtomicBool(atomic::AtomicBool::new(value))
        }

        pub fn load(&self, order: Ordering) -> bool {
            point();
            self.0.load(order)
        }

        pub fn store(&self, value: bool, order: Ordering) {
            point();
            self.0.store(value, order);
        }

        pub fn swap(&self, value: bool, order: Ordering) -> bool {
            point();
            self.0.swap(value, order)
        }
    }

    #[derive(Default)]
    pub struct AtomicU64(atomic::AtomicU64);

    impl AtomicU64 {
        pub const fn new(value: u64) -> AtomicU64 {
            AtomicU64(atomic::AtomicU64::new(value))
        }

        pub fn load(&self, order: Ordering) -> u64 {
            point();
            self.0.load(order)
        }

        pub fn swap(&self, value: u64, order: Ordering) -> u64 {
            point();
            self.0.swap(value, order)
        }

        pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            point();
            self.0.fetch_add(value, order)
        }

        pub fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
            point();
            self.0.fetch_sub(value, order)
        }

        pub fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
            point();
            self.0.fetch_or(value, order)
        }
    }

    pub fn fence(order: Ordering) {
        point();
        atomic::fence(order);
    }
}
