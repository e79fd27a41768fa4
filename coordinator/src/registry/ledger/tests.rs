#![allow(clippy::unwrap_used)]
use super::*;
use galaxy_proto::join::{Proof, Request};

const NOW: Moment = Moment(1_800_000_000);

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}
fn terms(role: Role) -> Terms {
    Terms { role, uses: 1, lasts: Duration::from_secs(900), name: None }
}
fn binding(channel: u8) -> Binding {
    Binding { exporter: [channel; 32], server: vec![9; 91] }
}
fn later(seconds: u64) -> Moment {
    Moment(NOW.0 + seconds)
}
fn nobody(_: &DeviceName) -> bool {
    false
}

/// A request to join on a channel, as an honest machine sends it.
fn ask(id: InvitationId, secret: &Secret, wish: &str, channel: u8) -> JoinRequest {
    let request = Request::new().unwrap();
    let key = Request::key_of(request.der()).unwrap();
    let proof = Proof::of_guest(secret, &binding(channel), request.der(), &key, wish);
    JoinRequest { invitation: id, wish: wish.to_owned(), request: request.der().to_vec(), proof }
}

fn invited(terms: Terms) -> (Ledger, InvitationId, Secret) {
    let mut ledger = Ledger::default();
    let (id, secret, _) = ledger.invite(NOW, terms, "admin a".into(), nobody).unwrap();
    (ledger, id, secret)
}

#[test]
fn an_invitation_gives_its_role_once() {
    let (mut ledger, id, secret) = invited(terms(Role::Client));
    let first = ledger.admit(NOW, &ask(id, &secret, "laptop", 1), &binding(1), nobody).unwrap();
    assert_eq!((first.name, first.role), (name("laptop"), Role::Client));
    let second = ledger.admit(NOW, &ask(id, &secret, "phone", 2), &binding(2), nobody);
    assert_eq!(second, Err(Denial::Used(id)));
    assert_eq!(ledger.issued().collect::<Vec<_>>(), [(&name("laptop"), Role::Client)]);
}

#[test]
fn a_saved_ledger_reads_back_equal_and_keeps_used_invitations() {
    let (mut ledger, id, secret) = invited(terms(Role::Device));
    ledger.admit(NOW, &ask(id, &secret, "pi-1", 1), &binding(1), nobody).unwrap();
    ledger.remove(NOW, &name("pi-1"), "admin a".into(), &[]).unwrap();
    let kept = serde_json::to_string(&ledger).unwrap();
    let mut again: Ledger = serde_json::from_str(&kept).unwrap();
    assert_eq!(again, ledger);
    let used = again.admit(NOW, &ask(id, &secret, "pi-2", 1), &binding(1), nobody);
    assert_eq!(used, Err(Denial::Used(id)), "uses are kept");
}

#[test]
fn replays_and_wrong_secrets_are_refused_and_use_no_invitation_up() {
    let (mut ledger, id, secret) = invited(terms(Role::Device));
    let overheard = ask(id, &secret, "pi-1", 1);
    let elsewhere = ledger.admit(NOW, &overheard, &binding(2), nobody);
    assert_eq!(elsewhere, Err(Denial::Ask(AskError::Proof)));
    let guessed = ask(id, &Secret([0; 16]), "pi-1", 1);
    let denied = ledger.admit(NOW, &guessed, &binding(1), nobody).unwrap_err();
    assert_eq!((denied.code(), denied.guesses()), ("wrong_secret", true));
    let unknown = ask(InvitationId([0; 8]), &secret, "pi-1", 1);
    let denied = ledger.admit(NOW, &unknown, &binding(1), nobody).unwrap_err();
    assert_eq!((denied.code(), denied.guesses()), ("unknown_invitation", true));
    assert!(ledger.admit(NOW, &overheard, &binding(1), nobody).is_ok(), "it still holds");
}

#[test]
fn an_expired_invitation_is_refused() {
    let (mut ledger, id, secret) = invited(terms(Role::Device));
    let late = ledger.admit(later(900), &ask(id, &secret, "pi-1", 1), &binding(1), nobody);
    assert_eq!(late, Err(Denial::Expired { id, until: later(900) }));
    assert!(ledger.admit(later(899), &ask(id, &secret, "pi-1", 1), &binding(1), nobody).is_ok());
}

#[test]
fn members_get_the_name_of_the_invitation_or_a_free_name() {
    let (mut ledger, id, secret) = invited(Terms { uses: 3, ..terms(Role::Device) });
    let taken = |of: &DeviceName| *of == name("nuc");
    let admit = |ledger: &mut Ledger, wish: &str, at: u8| {
        ledger.admit(NOW, &ask(id, &secret, wish, at), &binding(at), taken).map(|a| a.name)
    };
    assert_eq!(admit(&mut ledger, "nuc", 1), Err(NameDenial::Taken(name("nuc")).into()));
    assert_eq!(admit(&mut ledger, "ca", 1), Err(NameDenial::Reserved(name("ca")).into()));
    assert_eq!(admit(&mut ledger, "", 1), Err(Denial::Nameless));
    assert_eq!(admit(&mut ledger, "pi-1", 1), Ok(name("pi-1")));
    assert_eq!(admit(&mut ledger, "pi-1", 2), Err(NameDenial::Taken(name("pi-1")).into()));
    ledger.remove(NOW, &name("pi-1"), "admin a".into(), &[]).unwrap();
    assert_eq!(admit(&mut ledger, "pi-1", 3), Err(NameDenial::Removed(name("pi-1")).into()));

    let named = Terms { name: Some(name("kitchen")), ..terms(Role::Device) };
    let (mut ledger, id, secret) = invited(named);
    let admitted = ledger.admit(NOW, &ask(id, &secret, "coordinator", 1), &binding(1), nobody);
    assert_eq!(admitted.unwrap().name, name("kitchen"), "a wish does not count");
}

#[test]
fn a_key_that_was_certified_before_is_refused() {
    let (mut ledger, id, secret) = invited(Terms { uses: 2, ..terms(Role::Device) });
    let first = ask(id, &secret, "pi-1", 1);
    ledger.admit(NOW, &first, &binding(1), nobody).unwrap();
    let key = Request::key_of(&first.request).unwrap();
    let proof = Proof::of_guest(&secret, &binding(2), &first.request, &key, "pi-2");
    let again = JoinRequest { wish: "pi-2".into(), proof, ..first };
    assert_eq!(ledger.admit(NOW, &again, &binding(2), nobody), Err(Denial::KnownKey));
}

#[test]
fn invitations_outside_the_bounds_are_refused() {
    let mut ledger = Ledger::default();
    let mut invite = |terms| ledger.invite(NOW, terms, "admin a".into(), nobody);
    assert!(matches!(invite(terms(Role::Coordinator)), Err(InviteError::Coordinator)));
    for uses in [0, MAX_USES + 1] {
        let wrong = invite(Terms { uses, ..terms(Role::Device) });
        assert!(matches!(wrong, Err(InviteError::Uses { .. })));
    }
    let named = Terms { uses: 2, name: Some(name("pi-1")), ..terms(Role::Device) };
    assert!(matches!(invite(named), Err(InviteError::Uses { .. })));
    let long = Terms { lasts: LONGEST + Duration::from_secs(1), ..terms(Role::Device) };
    assert!(matches!(invite(long), Err(InviteError::Lasts)));
    for _ in 0..MAX_INVITATIONS {
        invite(terms(Role::Device)).unwrap();
    }
    assert!(matches!(invite(terms(Role::Device)), Err(InviteError::Many)));
    assert!(ledger.invite(later(900), terms(Role::Device), "a".into(), nobody).is_ok());
}

#[test]
fn removed_members_stay_on_the_list_of_removed_names_and_keys() {
    let (mut ledger, id, secret) = invited(terms(Role::Device));
    let admitted = ledger.admit(NOW, &ask(id, &secret, "pi-1", 1), &binding(1), nobody).unwrap();
    assert_eq!(ledger.removed(), Removed::default());
    let remove = |ledger: &mut Ledger, who: &str| {
        ledger.remove(NOW, &name(who), "admin a".into(), &[name("by-hand")])
    };
    let unknown = remove(&mut ledger, "pi-9").unwrap_err();
    assert!(unknown.to_string().contains("known are by-hand, pi-1"), "{unknown}");
    remove(&mut ledger, "pi-1").unwrap();
    remove(&mut ledger, "pi-1").unwrap();
    remove(&mut ledger, "by-hand").unwrap();
    let removed = ledger.removed();
    assert_eq!((removed.version, removed.names.len(), removed.keys.len()), (2, 2, 1));
    assert!(removed.keys.contains(&admitted.key.fingerprint()));
}
