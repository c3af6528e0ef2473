//! Log pages: built whole, then cut to what was asked for (Base 2.0, 5.16).
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use zerocopy::{FromZeros, IntoBytes};

use super::controller::Controller;
use super::identify::ERROR_LOG_ENTRIES;
use crate::nvme::base::{NSID_ALL, admin, nvm};
use crate::nvme::command::GetLogPage;
use crate::nvme::log::{
    ChangedNamespaceList, CommandEffects, CommandEffectsLog, ErrorLogEntry, FirmwareSlotLog, SmartLog, lid,
    trtype,
};
use crate::nvme::status::Status;

/// Log Page Supported: bit 0 of an entry of page 00h; bit 1 = an index offset is supported.
const SUPPORTED: u32 = 1;
const SUPPORTED_PAGES_LEN: usize = 1024;
/// The pages of every I/O controller.
const PAGES: &[u8] = &[
    lid::SUPPORTED_LOG_PAGES,
    lid::ERROR,
    lid::SMART,
    lid::FIRMWARE_SLOT,
    lid::CHANGED_NAMESPACES,
    lid::COMMAND_EFFECTS,
    lid::PERSISTENT_EVENT,
];
/// Admin commands that change nothing a host could see elsewhere.
const PLAIN: CommandEffects = CommandEffects(0).with_csupp(true);

/// The errors of a controller's commands, newest first.
#[derive(Default)]
pub struct ErrorLog {
    entries: VecDeque<ErrorLogEntry>,
    count: u64,
}

impl ErrorLog {
    pub fn record(&mut self, sqid: u16, cid: u16, status: Status, nsid: u32) {
        self.count += 1;
        let mut entry = ErrorLogEntry::new_zeroed();
        entry.error_count = self.count.into();
        entry.sqid = sqid.into();
        entry.cid = cid.into();
        entry.status_field = status.to_wire().into();
        // No particular byte of the command is named.
        entry.parameter_location = 0xFFFF.into();
        entry.nsid = nsid.into();
        entry.trtype = trtype::TCP;
        self.entries.truncate(ERROR_LOG_ENTRIES - 1);
        self.entries.push_front(entry);
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    fn page(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self.entries.iter().flat_map(|entry| entry.as_bytes()).copied().collect();
        page.resize(ERROR_LOG_ENTRIES * size_of::<ErrorLogEntry>(), 0);
        page
    }
}

/// A page of an I/O controller.
pub fn page(command: &GetLogPage, controller: &Controller, errors: &ErrorLog) -> Result<Vec<u8>, Status> {
    Ok(match command.lid {
        lid::SUPPORTED_LOG_PAGES if controller.subsystem.ana_reporting => {
            supported_pages(&[PAGES, &[lid::ANA]].concat())
        }
        lid::SUPPORTED_LOG_PAGES => supported_pages(PAGES),
        lid::ERROR => errors.page(),
        // Health is the controller's: there is none per namespace (LPA bit 0).
        lid::SMART if !matches!(command.nsid, 0 | NSID_ALL) => return Err(Status::INVALID_FIELD.with_dnr()),
        lid::SMART => smart(controller, errors).as_bytes().to_vec(),
        lid::FIRMWARE_SLOT => firmware_slots().as_bytes().to_vec(),
        lid::CHANGED_NAMESPACES => changed_namespaces(controller.changed_namespaces()),
        lid::COMMAND_EFFECTS => effects().as_bytes().to_vec(),
        _ => return Err(Status::INVALID_LOG_PAGE.with_dnr()),
    })
}

/// The pages of a discovery controller other than the discovery log.
pub fn discovery_page(command: &GetLogPage) -> Result<Vec<u8>, Status> {
    match command.lid {
        lid::SUPPORTED_LOG_PAGES => Ok(supported_pages(&[lid::SUPPORTED_LOG_PAGES, lid::DISCOVERY])),
        _ => Err(Status::INVALID_LOG_PAGE.with_dnr()),
    }
}

/// What there is of `page` for the command: from its offset, `len` bytes at most. Behind the page's end are zeros.
pub fn cut(page: &[u8], command: &GetLogPage, len: usize) -> Result<Vec<u8>, Status> {
    // Offsets are in bytes and dword aligned; index offsets are for pages that we do not have (Base 5.16).
    if command.ot || command.lpo & 3 != 0 || command.lpo >= page.len() as u64 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let rest = &page[command.lpo as usize..];
    Ok(rest[..rest.len().min(len)].to_vec())
}

fn supported_pages(list: &[u8]) -> Vec<u8> {
    let mut page = vec![0; SUPPORTED_PAGES_LEN];
    for &lid in list {
        page[usize::from(lid) * 4..][..4].copy_from_slice(&SUPPORTED.to_le_bytes());
    }
    page
}

fn smart(controller: &Controller, errors: &ErrorLog) -> SmartLog {
    let traffic = controller.traffic();
    let mut log = SmartLog::new_zeroed();
    log.available_spare = 100;
    // Thousands of 512 byte units, rounded up.
    log.data_units_read = u128::from(traffic.bytes_read.div_ceil(512_000)).into();
    log.data_units_written = u128::from(traffic.bytes_written.div_ceil(512_000)).into();
    log.host_read_commands = u128::from(traffic.reads).into();
    log.host_write_commands = u128::from(traffic.writes).into();
    log.media_errors = u128::from(traffic.media_errors).into();
    log.error_log_entries = u128::from(errors.count()).into();
    log
}

fn firmware_slots() -> FirmwareSlotLog {
    let mut log = FirmwareSlotLog::new_zeroed();
    log.afi = 1;
    crate::nvme::identify::IdentifyController::set_text(&mut log.revisions[0], env!("CARGO_PKG_VERSION"));
    log
}

fn changed_namespaces(changed: Option<Vec<u32>>) -> Vec<u8> {
    let mut log = ChangedNamespaceList::new_zeroed();
    match changed {
        None => log.nsids[0] = NSID_ALL.into(),
        Some(list) => {
            for (entry, nsid) in log.nsids.iter_mut().zip(list) {
                *entry = nsid.into();
            }
        }
    }
    log.as_bytes().to_vec()
}

fn effects() -> CommandEffectsLog {
    let mut log = CommandEffectsLog::new_zeroed();
    for opcode in [
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
    ] {
        log.admin[usize::from(opcode)] = PLAIN.0.into();
    }
    for opcode in [nvm::FLUSH, nvm::READ, nvm::COMPARE, nvm::VERIFY] {
        log.io[usize::from(opcode)] = PLAIN.0.into();
    }
    // They change blocks and nothing else, and need not wait for each other: no CSE, and hosts know no CSP for them.
    for opcode in [nvm::WRITE, nvm::WRITE_ZEROES, nvm::DATASET_MANAGEMENT, nvm::COPY] {
        log.io[usize::from(opcode)] = PLAIN.with_lbcc(true).0.into();
    }
    log
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_cut_by_offset_and_length() {
        let page: Vec<u8> = (0..64).collect();
        let command = |lpo| GetLogPage { lpo, ..GetLogPage::default() };
        assert_eq!(cut(&page, &command(0), 8).unwrap(), (0..8).collect::<Vec<u8>>());
        assert_eq!(cut(&page, &command(60), 8).unwrap(), [60, 61, 62, 63]);
        for lpo in [64, 68, 2, u64::MAX - 3, u64::MAX] {
            assert_eq!(cut(&page, &command(lpo), 4), Err(Status::INVALID_FIELD.with_dnr()), "{lpo}");
        }
        let index = GetLogPage { ot: true, ..GetLogPage::default() };
        assert!(cut(&page, &index, 4).is_err());
    }

    #[test]
    fn the_error_log_keeps_the_newest() {
        let mut log = ErrorLog::default();
        for cid in 0..100 {
            log.record(1, cid, Status::LBA_OUT_OF_RANGE, 1);
        }
        let page = log.page();
        assert_eq!(page.len(), 64 * 64);
        assert_eq!(page[..8], 100u64.to_le_bytes());
        assert_eq!(page[63 * 64..][..8], 37u64.to_le_bytes());
        assert_eq!(log.count(), 100);
    }

    #[test]
    fn more_changes_than_fit_are_shown_as_one() {
        assert_eq!(changed_namespaces(None)[..8], [0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0]);
        assert_eq!(changed_namespaces(Some(vec![1, 300]))[..12], [1, 0, 0, 0, 44, 1, 0, 0, 0, 0, 0, 0]);
    }
}
