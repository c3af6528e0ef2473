//! The controller properties: capabilities, configuration, status (Base 2.0, 3.1.3).
//!
//! ```text
//!             CC.EN 0→1                     CC.EN 1→0
//!   disabled ───────────▶ enabled, RDY=1 ───────────▶ disabled, RDY=1 until the last I/O queue is gone, then RDY=0
//!                              │ CC.SHN 01b/10b
//!                              └────────▶ SHST=01b until the last I/O queue is gone, then 10b; CC.EN 1→0 starts over
//! ```
#![forbid(unsafe_code)]

use crate::nvme::fabrics::{Cap, Cc, Csts, PropertyCommand, Version, property};
use crate::nvme::status::Status;

/// CAP.TO in units of 500 ms: longer than the drain of I/O queues may take.
const READY_TIMEOUT: u64 = 30;

/// READY_TIMEOUT in milliseconds.
pub const READY_TIMEOUT_MS: u64 = READY_TIMEOUT * 500;
/// CAP.CRMS: ready with media, as every controller of revision 2.0 is (Base 3.1.3.1).
const READY_WITH_MEDIA: u64 = 1;

/// What a write to CC asks the controller to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    None,
    Enable,
    /// Reset: all I/O queues end.
    Disable,
    /// Shutdown: all I/O queues end, the admin queue stays.
    Shutdown,
}

pub struct Registers {
    cap: Cap,
    cc: Cc,
    shutting_down: bool,
    /// When CC last asked for a transition.
    changed_ms: u64,
}

impl Registers {
    pub fn new(max_queue_depth: u16) -> Registers {
        let cap = Cap(0)
            .with_mqes(u64::from(max_queue_depth) - 1)
            .with_cqr(true)
            .with_to(READY_TIMEOUT)
            .with_crms(READY_WITH_MEDIA)
            // NVM alone, or chosen by CC.CSS = 6.
            .with_css(1 | 1 << 6);
        Registers { cap, cc: Cc(0), shutting_down: false, changed_ms: 0 }
    }

    /// Enabled, and not shut down: admin commands are served.
    pub fn is_ready(&self) -> bool {
        self.cc.en() && !self.shutting_down
    }

    /// `io_queues` are still there.
    pub fn get(&self, command: &PropertyCommand, io_queues: usize, now_ms: u64) -> Result<u64, Status> {
        let offset = command.ofst.get();
        // A property may only be read in its own size; the upper half of CAP is not one.
        if command.width().is_none() || property::width(offset) != command.width() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        match offset {
            property::CAP => Ok(self.cap.0),
            property::VS => Ok(Version::V2_0.0.into()),
            // CRWMT: the same as CAP.TO.
            property::CRTO => Ok(READY_TIMEOUT),
            property::CC => Ok(self.cc.0.into()),
            property::CSTS => Ok(self.status(io_queues, now_ms).0.into()),
            _ => Err(Status::INVALID_FIELD.with_dnr()),
        }
    }

    pub fn set(&mut self, command: &PropertyCommand, now_ms: u64) -> Result<Transition, Status> {
        if command.ofst.get() != property::CC || command.width() != Some(4) {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let new = Cc(command.value.get() as u32);
        let old = self.cc;
        if new.en() && !old.en() && !is_supported(new) {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        self.cc = new;
        let transition = self.transition(old, new);
        if transition != Transition::None {
            self.changed_ms = now_ms;
        }
        Ok(transition)
    }

    fn transition(&mut self, old: Cc, new: Cc) -> Transition {
        if old.en() && !new.en() {
            self.shutting_down = false;
            return Transition::Disable;
        }
        if new.shn() != 0 && !self.shutting_down {
            self.shutting_down = true;
            return Transition::Shutdown;
        }
        if new.en() && !old.en() {
            self.shutting_down = false;
            return Transition::Enable;
        }
        Transition::None
    }

    fn status(&self, io_queues: usize, now_ms: u64) -> Csts {
        let shst = match (self.shutting_down, io_queues) {
            (false, _) => 0,
            (true, 0) => 2,
            (true, _) => 1,
        };
        let is_leaving = io_queues > 0 && (self.shutting_down || !self.cc.en());
        // A device holds commands for longer than hosts were told to wait: they must not believe that all is over.
        let is_stuck = is_leaving && now_ms >= self.changed_ms + READY_TIMEOUT_MS;
        Csts(0)
            .with_rdy(self.cc.en() || (io_queues > 0 && !self.shutting_down))
            .with_shst(shst)
            .with_cfs(is_stuck)
    }
}

/// NVM or all command sets, 4 KiB pages, round robin, and entries of 64 and 16 bytes.
fn is_supported(cc: Cc) -> bool {
    matches!(cc.css(), 0 | 6)
        && cc.mps() == 0
        && cc.ams() == 0
        && !cc.crime()
        && (cc.iosqes() == 6 || cc.iosqes() == 0)
        && (cc.iocqes() == 4 || cc.iocqes() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(registers: &mut Registers, value: u32) -> Result<Transition, Status> {
        registers.set(&PropertyCommand::set(property::CC, value.into()), 0)
    }

    fn csts(registers: &Registers, io_queues: usize) -> u64 {
        registers.get(&PropertyCommand::get(property::CSTS), io_queues, 0).unwrap()
    }

    #[test]
    fn enable_reset_and_shutdown_show_in_the_status() {
        let mut registers = Registers::new(128);
        assert_eq!(csts(&registers, 0), 0);
        assert_eq!(set(&mut registers, 0x0046_0001), Ok(Transition::Enable));
        assert_eq!(csts(&registers, 3), 1);
        assert_eq!(set(&mut registers, 0x0046_0000), Ok(Transition::Disable));
        assert_eq!(csts(&registers, 3), 1, "ready until the I/O queues are gone");
        assert_eq!(csts(&registers, 0), 0);
        assert_eq!(set(&mut registers, 0x0046_0001), Ok(Transition::Enable));
        assert_eq!(set(&mut registers, 0x0046_4001), Ok(Transition::Shutdown));
        assert_eq!(set(&mut registers, 0x0046_4001), Ok(Transition::None), "once");
        assert_eq!(csts(&registers, 1), 0b0101);
        assert_eq!(csts(&registers, 0), 0b1001);
        assert!(!registers.is_ready());
        assert_eq!(set(&mut registers, 0), Ok(Transition::Disable));
        assert_eq!(set(&mut registers, 0x0046_0001), Ok(Transition::Enable));
        assert!(registers.is_ready());
    }

    #[test]
    fn a_controller_whose_queues_do_not_go_is_stuck_and_never_says_that_it_is_done() {
        let mut registers = Registers::new(128);
        for (cc, running) in [(0x0046_0000, 0b0001), (0x0046_4001, 0b0101)] {
            assert_eq!(set(&mut registers, 0x0046_0001), Ok(Transition::Enable));
            assert!(set(&mut registers, cc).is_ok());
            let csts = |now_ms| registers.get(&PropertyCommand::get(property::CSTS), 1, now_ms).unwrap();
            assert_eq!(csts(READY_TIMEOUT_MS - 1), running);
            assert_eq!(csts(READY_TIMEOUT_MS), running | 0b10, "fatal status");
            assert_eq!(csts(READY_TIMEOUT_MS) & 0b1000, 0);
            assert!(set(&mut registers, 0).is_ok());
        }
    }

    #[test]
    fn what_is_not_supported_does_not_enable() {
        // Ready without media, page size 8 KiB, weighted round robin, command set 1, entries of 128 bytes.
        for cc in [0x0146_0001, 0x0046_0081, 0x0046_0801, 0x0046_0011, 0x0047_0001, 0x0056_0001] {
            let mut registers = Registers::new(128);
            assert_eq!(set(&mut registers, cc), Err(Status::INVALID_FIELD.with_dnr()), "{cc:#x}");
            assert_eq!(csts(&registers, 0), 0);
        }
        assert_eq!(set(&mut Registers::new(128), 0x0046_0061), Ok(Transition::Enable), "all command sets");
    }

    #[test]
    fn only_whole_properties_that_exist_can_be_read_and_only_cc_written() {
        let registers = Registers::new(1024);
        let cap = registers.get(&PropertyCommand::get(property::CAP), 0, 0).unwrap();
        assert_eq!(cap & 0xFFFF, 1023);
        assert_eq!(cap >> 37 & 0xFF, 0x41);
        assert_eq!(registers.get(&PropertyCommand::get(property::VS), 0, 0), Ok(0x0002_0000));
        let crto = registers.get(&PropertyCommand::get(property::CRTO), 0, 0);
        assert_eq!((cap >> 59 & 3, crto), (1, Ok(cap >> 24 & 0xFF)), "ready with media, in that time");
        let half = PropertyCommand { attrib: 0, ..PropertyCommand::get(property::CAP) };
        let wide = PropertyCommand { attrib: 1, ..PropertyCommand::get(property::CSTS) };
        let reserved = PropertyCommand { attrib: 7, ..PropertyCommand::get(property::CSTS) };
        for wrong in [half, wide, reserved, PropertyCommand::get(4), PropertyCommand::get(0x1000)] {
            assert_eq!(registers.get(&wrong, 0, 0), Err(Status::INVALID_FIELD.with_dnr()));
        }
        let mut registers = registers;
        for offset in [property::CAP, property::CSTS, property::VS, 0x15, 0xFFFF_FFFC] {
            assert!(registers.set(&PropertyCommand::set(offset, 1), 0).is_err());
        }
    }
}
