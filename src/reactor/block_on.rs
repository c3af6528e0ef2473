//! Running one future to its end on the calling thread: for tests and small tools, not for reactors.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::time::Instant;

use super::executor::Executor;

/// Runs `future`, and what it spawns, on an executor of its own until the future is done; spawned tasks
/// that are left then are dropped. Sleeps in real time. There is no ring here: operations on files and
/// sockets need a reactor.
pub fn block_on<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    let thread = std::thread::current();
    let mut executor = Executor::with_kick(Box::new(move || thread.unpark()));
    let result = Rc::new(RefCell::new(None));
    let output = Rc::clone(&result);
    executor.spawn(async move {
        let value = future.await;
        *output.borrow_mut() = Some(value);
    });
    loop {
        executor.set_now(Instant::now());
        executor.pass();
        if let Some(value) = result.borrow_mut().take() {
            return value;
        }
        if executor.has_ready() || executor.has_idle() || !executor.prepare_sleep() {
            continue;
        }
        match executor.next_deadline() {
            Some(deadline) => {
                std::thread::park_timeout(deadline.saturating_duration_since(Instant::now()));
            }
            None => std::thread::park(),
        }
        executor.end_sleep();
    }
}
