use super::*;

#[test]
fn an_error_names_its_part_only_if_there_are_several() {
    let error = || ClientError::Malformed { what: String::new() };
    assert!(matches!(in_part(error(), &(0..5), 5), ClientError::Malformed { .. }));
    assert!(matches!(
        in_part(error(), &(1024..1500), 1500),
        ClientError::Part { first: 1024, count: 476, .. }
    ));
}
