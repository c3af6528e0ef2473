//! What a reactor waits on.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// The thread's way to sleep and be woken.
pub(super) struct Driver {
    event: Arc<EventFd>,
}

impl Driver {
    pub(super) fn new() -> io::Result<(Driver, Box<dyn Fn() + Send + Sync>)> {
        let event =
            Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let driver = Driver { event: Arc::clone(&event) };
        let kick = move || {
            // Fails only when the counter is full, and then the sleeper is awake.
            let _ = event.write(1);
        };
        Ok((driver, Box::new(kick)))
    }

    pub(super) fn turn(&mut self) -> bool {
        false
    }

    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        let timeout = timeout.map_or(-1, |timeout| timeout.as_millis().saturating_add(1).min(1 << 30) as i32);
        poll_fd(self.event.as_raw_fd(), libc::POLLIN, timeout);
        let _ = self.event.read();
    }
}

fn poll_fd(fd: RawFd, events: i16, timeout_ms: i32) -> bool {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one valid pollfd, exclusively borrowed for the call.
    unsafe { libc::poll(&mut entry, 1, timeout_ms) > 0 }
}

/// Parks the task until `fd` is readable.
pub async fn readable(fd: RawFd) -> io::Result<()> {
    while !poll_fd(fd, libc::POLLIN, 0) {
        super::sleep(Duration::from_micros(200)).await;
    }
    Ok(())
}

/// Parks the task until `fd` is writable.
pub async fn writable(fd: RawFd) -> io::Result<()> {
    while !poll_fd(fd, libc::POLLOUT, 0) {
        super::sleep(Duration::from_micros(200)).await;
    }
    Ok(())
}
