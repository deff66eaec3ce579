use std::path::Path;

use super::*;
use crate::auth::ticket::SealedTicket;
use proptest::prelude::*;

const CONTEXT: &str = "threefs/meta";
const NOW: u64 = 1_800_000_000;

fn ring(text: &str) -> KeyRing {
    KeyRing::parse(Path::new("ring"), text.as_bytes()).unwrap()
}

fn one() -> KeyRing {
    ring("1:0123456789abcdef0123456789abcdef")
}

fn keys(ring: KeyRing) -> Credential {
    Credential::Keys(Arc::new(ring))
}

fn ticket() -> Ticket {
    Ticket {
        cluster: "default".into(),
        key_id: 0,
        directory: 77,
        path: "/volumes/pvc-1".into(),
        read_only: true,
        node: String::new(),
        expires_unix_s: NOW + 10,
    }
}

fn sealed(ticket: Ticket, ring: &KeyRing) -> Credential {
    Credential::Ticket(Arc::new(ticket.seal(ring).unwrap()))
}

/// Runs both sides without a socket: returns the acceptor's result and the dialer's.
fn meet(
    credential: &Credential,
    ring: &KeyRing,
    change: impl FnOnce(&mut Vec<u8>),
) -> (Result<Grant, AuthError>, Result<(), AuthError>) {
    let (dialer, mut hello) = Dialer::new(credential, CONTEXT, b"", [1; 32]);
    change(&mut hello);
    let result = accept(&hello, ring, CONTEXT, b"");
    let (acceptor, challenge) = match result {
        Ok(acceptor) => acceptor,
        Err(error) => return (Err(error), Ok(())),
    };
    let proof = match dialer.answer(&challenge) {
        Ok(proof) => proof,
        Err(error) => {
            let why = acceptor.unknown_key();
            let context = CONTEXT.into();
            return (Err(why.unwrap_or(AuthError::WrongKey { context })), Err(error));
        }
    };
    let (verdict, grant) = acceptor.check(&proof, "default", NOW);
    (grant, verdict.map_or(Ok(()), |verdict| dialer.conclude(verdict)))
}

fn accept(
    hello: &[u8],
    ring: &KeyRing,
    context: &str,
    binding: &[u8],
) -> Result<(Acceptor, [u8; CHALLENGE_BYTES]), AuthError> {
    let mut fixed = [0; HELLO_BYTES];
    fixed.copy_from_slice(&hello[..HELLO_BYTES]);
    let parsed = Hello::parse(context, fixed)?;
    let ticket = &hello[HELLO_BYTES..HELLO_BYTES + parsed.ticket_bytes()];
    Acceptor::new(ring, context, binding, &parsed, ticket, [2; 32])
}

#[test]
fn a_key_opens_as_a_service_and_a_ticket_as_its_volume() {
    let (grant, dialed) = meet(&keys(one()), &one(), |_| {});
    assert!(matches!(grant, Ok(Grant::Service)) && dialed.is_ok());
    let (grant, dialed) = meet(&sealed(ticket(), &one()), &one(), |_| {});
    let grant = grant.unwrap();
    assert_eq!(grant.ticket().unwrap().directory, 77);
    assert!(grant.ticket().unwrap().read_only && dialed.is_ok());
}

#[test]
fn every_key_of_the_ring_is_accepted_and_no_other() {
    let (old, new) = ("1:0123456789abcdef0123456789abcdef", "2:ffffffffffffffffffffffffffffffff");
    let both = ring(&format!("{new}\n{old}"));
    for text in [old, new] {
        let dialers = [keys(ring(text)), sealed(ticket(), &ring(text))];
        for credential in dialers {
            let (grant, dialed) = meet(&credential, &both, |_| {});
            assert!(grant.is_ok() && dialed.is_ok());
        }
    }
    for credential in [keys(ring(old)), sealed(ticket(), &ring(old))] {
        let (grant, dialed) = meet(&credential, &ring(new), |_| {});
        assert!(matches!(grant, Err(AuthError::UnknownKey { id: 1, .. })));
        assert!(matches!(dialed, Err(AuthError::WrongKey { .. })));
    }
    // The same id with another key.
    let (grant, _) = meet(&keys(ring("1:ffffffffffffffffffffffffffffffff")), &one(), |_| {});
    assert!(matches!(grant, Err(AuthError::WrongKey { .. })));
}

#[test]
fn expired_and_foreign_tickets_are_refused_by_name_on_both_sides() {
    let expired = Ticket { expires_unix_s: NOW, ..ticket() };
    let (grant, dialed) = meet(&sealed(expired, &one()), &one(), |_| {});
    assert!(matches!(grant, Err(AuthError::Expired { .. })));
    let error = dialed.unwrap_err().to_string();
    assert!(error.contains("/volumes/pvc-1") && error.contains("expired"), "{error}");
    let foreign = Ticket { cluster: "other".into(), ..ticket() };
    let (grant, dialed) = meet(&sealed(foreign, &one()), &one(), |_| {});
    let error = grant.unwrap_err().to_string();
    assert!(error.contains("`other`") && error.contains("`default`"), "{error}");
    assert!(matches!(dialed, Err(AuthError::OtherCluster { .. })));
}

#[test]
fn a_ticket_cannot_be_changed_into_another() {
    // The holder of a ticket changes its directory, its expiry and its mode.
    let sealed = ticket().seal(&one()).unwrap();
    for forged in [
        Ticket { directory: 1, ..ticket() },
        Ticket { expires_unix_s: NOW + 1_000_000, ..ticket() },
        Ticket { read_only: false, ..ticket() },
    ] {
        let text = sealed.to_text();
        let secret = text.trim().rsplit(':').next().unwrap();
        let other = forged.seal(&one()).unwrap().to_text();
        let mixed = format!("{}:{secret}", other.trim().rsplit_once(':').unwrap().0);
        let mixed = SealedTicket::parse(Path::new("t"), mixed.as_bytes()).unwrap();
        let (grant, dialed) = meet(&Credential::Ticket(Arc::new(mixed)), &one(), |_| {});
        assert!(grant.is_err() && matches!(dialed, Err(AuthError::WrongKey { .. })));
    }
}

#[test]
fn a_ticket_does_not_open_as_a_service() {
    let sealed = ticket().seal(&one()).unwrap();
    // Its secret used as the cluster's key, without the ticket.
    let secret = Credential::Keys(Arc::new(KeyRing::of(sealed.secret().clone())));
    let (grant, _) = meet(&secret, &one(), |hello| hello[40..44].copy_from_slice(&[1, 0, 0, 0]));
    assert!(grant.is_err());
    // The ticket is removed from the first message.
    let (grant, _) = meet(&Credential::Ticket(Arc::new(sealed)), &one(), |hello| {
        hello.truncate(HELLO_BYTES);
        hello[44..46].copy_from_slice(&[0, 0]);
    });
    assert!(grant.is_err());
}

#[test]
fn a_proof_fits_one_service_one_channel_and_one_handshake() {
    let credential = keys(one());
    let (dialer, hello) = Dialer::new(&credential, CONTEXT, b"channel", [1; 32]);
    for (context, binding) in [("threefs/storage", &b"channel"[..]), (CONTEXT, b"other channel")] {
        let (_, challenge) = accept(&hello, &one(), context, binding).unwrap();
        assert!(dialer.answer(&challenge).is_err());
    }
    let (_, challenge) = accept(&hello, &one(), CONTEXT, b"channel").unwrap();
    let proof = dialer.answer(&challenge).unwrap();
    // A recorded handshake is replayed: the acceptor uses another nonce.
    let mut fixed = [0; HELLO_BYTES];
    fixed.copy_from_slice(&hello);
    let again = Hello::parse(CONTEXT, fixed).unwrap();
    let (acceptor, _) = Acceptor::new(&one(), CONTEXT, b"channel", &again, &[], [3; 32]).unwrap();
    assert!(acceptor.check(&proof, "default", NOW).1.is_err());
    // The acceptor's proof is reflected.
    let (acceptor, challenge) = accept(&hello, &one(), CONTEXT, b"channel").unwrap();
    let mut reflected = [0; PROOF_BYTES];
    reflected.copy_from_slice(&challenge[32..]);
    assert!(acceptor.check(&reflected, "default", NOW).1.is_err());
}

#[test]
fn lengths_are_checked_before_a_ticket_is_read_and_versions_are_named() {
    let (_, hello) = Dialer::new(&keys(one()), CONTEXT, b"", [1; 32]);
    let mut fixed = [0; HELLO_BYTES];
    fixed.copy_from_slice(&hello);
    let mut long = fixed;
    long[44..46].copy_from_slice(&u16::MAX.to_le_bytes());
    let error = Hello::parse(CONTEXT, long).unwrap_err().to_string();
    assert!(error.contains("65535") && error.contains("1024"), "{error}");
    let mut old = fixed;
    old[..8].copy_from_slice(MAGIC_BEFORE);
    let error = Hello::parse(CONTEXT, old).unwrap_err().to_string();
    assert!(error.contains("older version"), "{error}");
    let mut newer = fixed;
    newer[47] = 1;
    assert!(Hello::parse(CONTEXT, newer).is_err());
}

proptest! {
    #[test]
    fn random_bytes_never_authenticate(
        hello in proptest::array::uniform32(any::<u8>()),
        tail in proptest::collection::vec(any::<u8>(), 16..1100),
        proof in proptest::array::uniform32(any::<u8>()),
        valid_header in any::<bool>(),
    ) {
        let mut bytes = [hello.to_vec(), tail].concat();
        if valid_header {
            bytes[..8].copy_from_slice(MAGIC);
            bytes[46..48].copy_from_slice(&[0, 0]);
            let most = bytes.len() - HELLO_BYTES;
            bytes[44..46].copy_from_slice(&(most as u16).to_le_bytes());
        }
        let mut fixed = [0; HELLO_BYTES];
        fixed.copy_from_slice(&bytes[..HELLO_BYTES]);
        if let Ok(parsed) = Hello::parse(CONTEXT, fixed)
            && bytes.len() >= HELLO_BYTES + parsed.ticket_bytes()
        {
            let ticket = &bytes[HELLO_BYTES..HELLO_BYTES + parsed.ticket_bytes()];
            let result = Acceptor::new(&one(), CONTEXT, b"", &parsed, ticket, [2; 32]);
            if let Ok((acceptor, _)) = result {
                prop_assert!(acceptor.check(&proof, "default", NOW).1.is_err());
            }
        }
    }
}
