-- A shop with personal data, and a publication of all its tables.
CREATE TABLE customers (
    id int PRIMARY KEY,
    email text,
    work_email text,
    phone text,
    address text,
    birthday date,
    income numeric(10, 2),
    password text
);
CREATE TABLE orders (id int PRIMARY KEY, email text, amount numeric(10, 2));
CREATE TABLE sessions (id int PRIMARY KEY, email text, token text);

INSERT INTO customers VALUES
    (1, 'ada@example.org', 'ada@engines.example', '+44 20 1', 'London', '1815-12-10', 52345.67, 'x'),
    (2, 'alan@example.org', 'alan@park.example', NULL, 'Bletchley', '1912-06-23', 41999.10, 'y');
INSERT INTO orders VALUES (1, 'ada@example.org', 12.50), (2, 'ada@example.org', 99.00), (3, 'alan@example.org', 7.10);
INSERT INTO sessions VALUES (1, 'ada@example.org', 't');

CREATE PUBLICATION shop FOR ALL TABLES;
