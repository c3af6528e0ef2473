//! The Persistent Event log and its reporting context.

use crate::client::*;

const LOG: u8 = 0x0D;
const SEQUENCE: u16 = 0x00C;
const READ: u32 = 0;
const ESTABLISH: u32 = 1;
const RELEASE: u32 = 2;

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

fn act(admin: &mut Wire, action: u32, offset: u32, len: u32) -> Completion {
    let dword = u32::from(LOG) | action << 8 | (len / 4 - 1) << 16;
    admin.get(Sqe::new(0x02, 0xFFFF_FFFF).dword(10, dword).dword(12, offset), len)
}

/// Type, controller and data of each event, newest first.
fn events(log: &[u8]) -> Vec<(u8, u16, Vec<u8>)> {
    assert_eq!((log[0], log[16], le(&log[18..20])), (LOG, 2, 492), "LID, revision, LHL");
    let mut events = Vec::new();
    let mut at = 512;
    for _ in 0..le(&log[4..8]) {
        assert_eq!((log[at + 1], log[at + 2]), (1, 21), "revision of the event, EHL");
        let len = le(&log[at + 22..at + 24]) as usize;
        events.push((log[at], le(&log[at + 4..at + 6]) as u16, log[at + 24..at + 24 + len].to_vec()));
        at += 24 + len;
    }
    assert_eq!(le(&log[8..16]), at as u64, "TLL");
    events
}

#[test]
fn the_log_tells_what_happened_in_a_context_that_nothing_tears() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    let id = admin.identify(1, 0).expect_ok();
    assert_eq!((id[261] & 0x10, le(&id[352..356])), (0x10, 1), "LPA, PELS");
    assert_eq!(admin.log_page(0, 0, 1024, true).expect_ok()[4 * usize::from(LOG)], 1);
    act(&mut admin, READ, 0, 512).expect_refused(SEQUENCE);
    let log = act(&mut admin, ESTABLISH, 0, 4096).expect_ok();
    act(&mut admin, ESTABLISH, 0, 512).expect_refused(SEQUENCE);
    assert_eq!(log[56..76], id[4..24], "serial number");
    assert_eq!(log[76..116], id[24..64], "model number");
    assert_eq!(log[116..372], id[768..1024], "SUBNQN");
    assert_eq!(le(&log[374..378]), 1 << 18, "a context exists");
    assert_eq!((log[480], log[481..512].iter().any(|&byte| byte != 0)), (0x50, false), "supported: 4 and 6");
    let told = events(&log);
    assert_eq!(told.len(), 2);
    // The reset by which this controller was enabled, and before that the namespace of 16384 blocks.
    assert_eq!((told[0].0, told[0].1, told[0].2.len()), (4, admin.cntlid, 44));
    assert_eq!(told[0].2[..8], id[64..72], "firmware revision");
    assert_eq!(le(&told[0].2[8..10]), u64::from(admin.cntlid));
    let mut namespace = vec![0; 48];
    (namespace[9], namespace[25]) = (0x40, 0x40);
    (namespace[34], namespace[36], namespace[44]) = (1, 1, 1);
    assert_eq!(told[1], (6, 0xFFFF, namespace));
    // What happens meanwhile is not in this context, and it can be read from anywhere.
    rig.ask(|target, _| async move { target.remove_namespace(SUBNQN, 1).await });
    assert_eq!(act(&mut admin, READ, 0, 4096).expect_ok(), log);
    assert_eq!(act(&mut admin, READ, 512, 64).expect_ok(), log[512..576]);
    act(&mut admin, READ, 4096, 64).expect_refused(0x002);
    // Another host has a context of its own.
    let mut other = rig.admin_as(OTHER_HOST);
    assert_eq!(events(&act(&mut other, ESTABLISH, 0, 4096).expect_ok()).len(), 4);
    // Released with any length, twice, and established anew.
    let release = Sqe::new(0x02, 0xFFFF_FFFF).dword(10, u32::from(LOG) | RELEASE << 8 | 0xFFFF << 16);
    assert!(admin.command(release.dword(11, 0xFFFF), &[]).ok() && act(&mut admin, RELEASE, 0, 512).ok());
    act(&mut admin, READ, 0, 512).expect_refused(SEQUENCE);
    let now = act(&mut admin, ESTABLISH, 0, 4096).expect_ok();
    assert_ne!(now[372..374], log[372..374], "generation");
    let told = events(&now);
    let mut removed = vec![0; 48];
    (removed[0], removed[44]) = (1, 1);
    assert_eq!((told.len(), &told[1]), (4, &(6, 0xFFFF, removed)));
    // A reset ends it.
    admin.property_set(0x14, 0x0046_0000).expect_ok();
    admin.enable();
    act(&mut admin, READ, 0, 512).expect_refused(SEQUENCE);
    act(&mut admin, 3, 0, 512).expect_refused(0x002);
}

#[test]
fn the_oldest_events_go_when_there_are_too_many() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    for _ in 0..300 {
        admin.property_set(0x14, 0x0046_0000).expect_ok();
        admin.enable();
    }
    let log = act(&mut admin, ESTABLISH, 0, 64 << 10).expect_ok();
    let told = events(&log);
    assert!(told.len() == 256 && told.iter().all(|event| event.0 == 4));
}
